"""The picture of the memory curve: kinds stacked, peaks kept, and its place in the report."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from meshwright.amounts import size
from meshwright.runs import RunFolder
from meshwright.studio import write_report
from meshwright.studio.memory import memory_chart

MIB = 2**20


def row(step: int, at: str, **changes: Any) -> dict[str, Any]:
    plain = {"micro_batch": None, "layer": None, "parameters_bytes": 4 * MIB, "gradients_bytes": 0}
    rest = {"optimizer_bytes": 0, "activations_bytes": 0, "other_bytes": MIB, "host_bytes": 0, "elapsed_s": 0.0}
    return {"step": step, "at": at, **plain, **rest, "rank": 0, "how": "allocator", **changes}


def steps(count: int) -> list[dict[str, Any]]:
    return [
        sample
        for step in range(1, count + 1)
        for sample in (
            row(step, "start"),
            row(step, "forward", micro_batch=1, layer="0", activations_bytes=20 * MIB),
            row(step, "backward_end", micro_batch=1, gradients_bytes=4 * MIB),
            row(step, "end", optimizer_bytes=8 * MIB),
        )
    ]


def heights(figure: str, kind: str) -> list[float]:
    (path,) = re.findall(rf'<path class="area kind-{kind}" d="M([^"]*)Z"', figure)
    return [float(point.split()[1]) for point in path.split("L")]


def test_kinds_lie_on_each_other() -> None:
    figure = memory_chart(steps(4))
    kinds = re.findall(r'<path class="area kind-(\w+)"', figure)
    assert kinds == ["other", "parameters", "optimizer", "gradients", "activations"]
    for below, above in pairwise(kinds):
        count = len(heights(figure, below)) // 2
        assert heights(figure, below)[:count] == heights(figure, above)[count:][::-1]  # its roof is the other's floor
    assert ">MiB<" in figure and figure.count('class="mark"') == 3
    data = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', figure)[0])
    assert data["labels"][1] == "step 1, after layer 0’s forward (micro-batch 1)"
    assert data["series"][-1]["y"][1] == 20 and data["series"][-1]["top"][1] == 25
    assert data["series"][0]["x"][:5] == [1, 1.25, 1.5, 1.75, 2]
    assert "most at step 1, after layer 0’s forward (micro-batch 1), 25 MiB" in figure


def test_what_is_not_counted_or_elsewhere_is_said() -> None:
    assert memory_chart([]) == ""
    assert "not counted" not in memory_chart(steps(1)) and "host memory" not in memory_chart(steps(1))
    followed = [one | {"other_bytes": None} for one in steps(1)]
    assert "is not counted on a CPU" in memory_chart(followed) and "kind-other" not in memory_chart(followed)
    compiled = [one | {"activations_bytes": None} for one in steps(1)]
    assert "compiled blocks are not counted" in memory_chart(compiled)
    assert "In host memory: 3 GiB at most." in memory_chart([*steps(1), row(1, "end", host_bytes=3 * 2**30)])


def test_many_samples_keep_their_peak() -> None:
    many = [row(1, "forward", layer=str(n), activations_bytes=n % 7 * MIB) for n in range(20_000)]
    many[12_345]["activations_bytes"] = 99 * MIB
    figure = memory_chart(many)
    assert "layer 12345’s forward, 104 MiB" in figure and len(figure) < 300_000


def test_the_report_shows_it(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "", {"run": {"steps": 1}}, ["meshwright"])
    assert run.memory_curve() == []
    assert "Memory in the first steps" not in write_report(run.path).read_text(encoding="utf-8")
    for sample in steps(2):
        run.memory(sample)
    run.event("stop", reason="finished", step=1, peak_memory_bytes=25 * MIB, steady_memory_bytes=13 * MIB)
    assert run.memory_curve() == steps(2)
    html = write_report(run.path).read_text(encoding="utf-8")
    assert "Memory in the first steps" in html and html.count('class="area') == 5
    assert "Peak memory" in html and ">25 MiB<" in html and "13 MiB between steps" in html


@pytest.mark.parametrize(
    ("value", "text"), [(512, "512 B"), (1536, "1.5 KiB"), (25 * MIB, "25 MiB"), (41.24 * 2**30, "41.2 GiB")]
)
def test_sizes_as_people_say_them(value: float, text: str) -> None:
    assert size(value) == text
