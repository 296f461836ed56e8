"""Kernels of a profiled step next to their floors, from a trace as torch writes it on a GPU."""

import json
import runpy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
VOCABULARY = 1000


@pytest.fixture(scope="module")
def floors() -> Any:
    """What reads a trace."""
    return Namespace(**runpy.run_path(str(BENCHMARKS / "kernel_floors.py")))


class Trace:
    """Operations and the kernels that they launch, one after the other."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
        self._number, self._now = 0, 0.0

    def launch(self, operation: str, dims: Any, *kernels: tuple[str, float], types: str = "c10::BFloat16") -> None:
        """An operation with tensors of one format, and its kernels with their microseconds."""
        self._number += 1
        given = {"External id": self._number, "Input Dims": dims, "Input type": [types] * len(dims)}
        event = {"ph": "X", "cat": "cpu_op", "name": operation, "ts": self._now, "dur": 1, "tid": 1, "args": given}
        self.events.append(event)
        for name, microseconds in kernels:
            args = {"External id": self._number, "stream": 7}
            kind = "gpu_memset" if name.startswith("Memset") else "kernel"
            span = {"ts": self._now, "dur": microseconds, "tid": 7}
            self.events.append({"ph": "X", "cat": kind, "name": name, "args": args, **span})
            self._now += microseconds
        self._now += 5.0


def test_kernels_are_merged_by_what_they_compute_and_compared_with_their_floors(floors: Any, tmp_path: Path) -> None:
    trace = Trace()
    for _ in range(2):  # steps
        for _ in range(3):
            trace.launch("aten::mm", [[64, 32], [32, 16]], ("Memset (Device)", 1.0), ("nvjet_a", 20.0), ("splitK", 4.0))
        trace.launch("aten::mm", [[64, 32], [32, VOCABULARY]], ("nvjet_b", 50.0))
        trace.launch("triton_red_fused_mean_rsqrt_0", [[1000], [1000]], ("triton_red_fused_mean_rsqrt_0", 8.0))
        trace.launch("aten::something", [], ("_adamw_of_many", 30.0), ("_adamw", 10.0))
        trace.launch("aten::embedding", [[10**6], [8]], ("indexSelect", 2.0))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": trace.events}))
    launches = floors.read_trace(path)
    rows = floors.rows_of(launches, 2, VOCABULARY)
    rates = floors.Rates(1e9, 1e12, {(64, 16, 32): 5e-6})
    found = {row.name: row for row in floors.with_floors(rows, rates, {"optimizer": 20e-6})}
    product = found["aten::mm 64 × 32 × 16"]
    assert (product.group, product.calls) == ("products", 3) and product.seconds == pytest.approx(72e-6)
    assert product.floor_s == pytest.approx(15e-6) and product.excess_s == pytest.approx(57e-6)
    head = found[f"aten::mm 64 × 32 × {VOCABULARY}"]
    assert head.group == "head and loss" and head.floor_s == pytest.approx(2 * 64 * 32 * VOCABULARY / 1e12)
    norm = found["triton_red_fused_mean_rsqrt_0"]
    assert norm.group == "norm and residual" and norm.floor_s == pytest.approx(4000 / 1e9)
    assert found["_adamw_of_many"].floor_s == pytest.approx(15e-6) and found["_adamw"].group == "optimizer"
    table = found["indexSelect"]
    assert table.group == "embedding" and table.floor_s > table.seconds and table.excess_s == 0.0
    assert found["Memset (Device)"].group == "copies" and found["Memset (Device)"].shape is None
    assert floors.busy_s(launches) == pytest.approx(2 * (75 + 50 + 8 + 40 + 2) * 1e-6)
    groups = floors.groups_of(found.values(), 9e-6)
    assert groups["gaps of the host"]["excess_s"] == 9e-6 and next(iter(groups)) == "products"
    assert groups["optimizer"]["excess_s"] == pytest.approx(20e-6)


def test_work_that_overlaps_is_busy_once(floors: Any) -> None:
    spans = [(0.0, 3.0), (1.0, 1.0), (2.0, 4.0), (10.0, 1.0)]
    launches = [floors.Launch("kernel", seconds, began) for began, seconds in spans]
    assert floors.busy_s(launches) == 7.0
