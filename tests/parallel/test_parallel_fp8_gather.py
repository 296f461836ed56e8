"""Weights gathered in fp8: the same bits as gathered in bf16, with half the bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import require_layout
from meshwright.parallel import fp8_gather
from meshwright.parallel.fp8 import FORWARD, quantise
from meshwright.parallel.fp8_gather import widen
from meshwright.torch_private.compiler import preload
from meshwright.verify import observe, run_ranks
from meshwright.verify.collectives import read

STEPS = 2
"""The second step gathers weights that an update has changed."""


def make_job(
    gather: bool, model: Any = None, memory: Any = None, precision: Any = None, run: Any = None, **layout: Any
) -> Job:
    ranks = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
    shape = {
        "vocab_size": 50, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_width": 64,
        "max_sequence_length": 32,
    }  # fmt: skip
    return Job.model_validate(
        {
            "model": shape | (model or {}),
            "data": {"sources": ["builtin:synthetic"], "workers": 0},
            "batch": {"sequence_length": 16 * layout.get("cp", 1), "global_batch": ranks, "micro_batch": 1},
            "precision": {"compute": "fp8", "fp8_gather": gather} | (precision or {}),
            "optimizer": {"lr": 1e-2, "eps": 1e-3},
            "schedule": {"warmup_steps": 0},
            "evaluation": {"every_steps": 0},
            "memory": memory or {},
            "layout": layout,
            "run": {"steps": STEPS} | (run or {}),
        }
    )


def seen(job: Job) -> tuple[Any, int]:
    """What a rank observes over some steps, and how many weights arrived in fp8."""
    arrived, was = 0, fp8_gather.widen

    def counting(narrow: Tensor, scale: Tensor, out: Tensor) -> None:
        nonlocal arrived
        arrived += 1
        was(narrow, scale, out)

    fp8_gather.widen = counting
    try:
        observed = observe(job, None)
    finally:
        fp8_gather.widen = was
    return observed, arrived


def both_ways(changes: dict[str, Any]) -> tuple[bool, int, int]:
    (narrow, arrived), (wide, none) = seen(make_job(True, **changes)), seen(make_job(False, **changes))
    same = all(getattr(narrow, name) == getattr(wide, name) for name in ("losses", "norms"))
    updates = all(torch.equal(shard.values, wide.updates[name].values) for name, shard in narrow.updates.items())
    return same and updates and len(narrow.losses) == STEPS, arrived, none


CASES = [
    (2, {"dp_shard": 2, "zero": 2}),
    (2, {"dp_shard": 2, "zero": 3}),
    (2, {"dp_shard": 2, "zero": 3, "memory": {"recompute": "full"}}),
    (2, {"dp_shard": 2, "zero": 3, "precision": {"gradients": "bf16"}}),
    (3, {"dp_shard": 3, "zero": 3}),  # 32 and 64 rows are not a multiple of 3
    (2, {"cp": 2, "zero": 3}),
    (4, {"dp_shard": 2, "dp_replicate": 2, "zero": 3}),
    (4, {"dp_shard": 2, "tp": 2, "zero": 3}),
    (4, {"dp_shard": 2, "pp": 2, "zero": 3}),
    (2, {"dp_shard": 2, "zero": 3, "model": {"experts": {"count": 4, "top_k": 2, "ffn_width": 32}}}),
]


def each_both_ways(every: list[dict[str, Any]]) -> list[tuple[bool, int, int]]:
    return [both_ways(changes) for changes in every]


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_same_bits_whether_gathered_in_fp8_or_bf16(ranks: int) -> None:
    every = [changes for size, changes in CASES if size == ranks]
    for results in run_ranks(each_both_ways, ranks, every):
        for changes, (same, arrived, none) in zip(every, results, strict=True):
            assert same and arrived > 0 and none == 0, changes


@pytest.mark.thorough
def test_compiled_blocks_too_whose_projections_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    preload(compiles=True)  # which each rank would otherwise do
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_module(self, backend="aot_eager"))
    changes = {"dp_shard": 2, "zero": 3, "model": {"layers": 1}, "run": {"compile": True}}
    for same, arrived, none in run_ranks(both_ways, 2, changes):
        assert same and arrived > 0 and none == 0


def gathered_bytes(folder: Path, gather: bool) -> int:
    """Of the messages in which two ranks gather the parameters of a model of wide blocks, in one step."""
    folder.mkdir()
    model = {"vocab_size": 16, "width": 128, "ffn_width": 256, "layers": 1}
    job = make_job(gather, dp_shard=2, zero=3, model=model, run={"steps": 1})
    run_ranks(observe, 2, job, None, record=folder)
    operations = read(folder, 2)[0].operations
    sent = [spec for operation in operations if operation.kind == "all_gather_into_tensor" for spec in operation.inputs]
    return sum(spec.numel * getattr(torch, spec.dtype.removeprefix("torch.")).itemsize for spec in sent)


@pytest.mark.thorough
def test_messages_have_half_the_bytes(tmp_path: Path) -> None:
    narrow, wide = gathered_bytes(tmp_path / "narrow", True), gathered_bytes(tmp_path / "wide", False)
    assert 0.5 < narrow / wide < 0.55  # norms, embedding and head stay bf16


def test_what_is_widened_rounds_to_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1e-30, 3e-5, 1.0, 7e4):
        weight = (torch.randn(64, 48, generator=generator) * size).to(torch.bfloat16)
        narrow, scale = quantise(weight, FORWARD)
        wide = torch.empty_like(weight)
        widen(narrow, scale, wide)
        again, same = quantise(wide, FORWARD)
        assert torch.equal(again.float(), narrow.float()) and torch.equal(same, scale)


@pytest.mark.thorough
def test_a_scale_of_another_weight_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison of bits rests on: a largest number that leaves out the other rank's rows."""
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **options: None)
    changes = {"dp_shard": 2, "zero": 3}
    assert not all(same for same, *_ in run_ranks(both_ways, 2, changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": {"fp8_scales": "row"}}, r'precision\.fp8_scales = "row" has more; set precision\.fp8_scales'),
        ({"memory": {"offload": ["params"]}}, r'memory\.offload = \["params"\] keeps them on the host; set precision'),
    ],
)
def test_what_it_does_not_go_with_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        require_layout(make_job(True, dp_shard=2, zero=3, **changes), 2)


@pytest.mark.gpu
def test_the_kernel_widens_as_the_reference_does() -> None:
    weight = torch.randn(300, 272, dtype=torch.bfloat16)
    narrow, scale = quantise(weight, FORWARD)
    reference, out = torch.empty_like(weight), torch.empty_like(weight, device="cuda")
    widen(narrow, scale, reference)
    widen(narrow.cuda(), scale.cuda(), out)
    assert torch.equal(out.cpu(), reference)
