"""Recorded calls, replayed by one rank: through gloo here, through NCCL where there is a GPU, by the same code."""

import json
import math
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.verify import Calls, Outcome, merged, run_ranks
from meshwright.verify.collectives import Call, Origin, Spec, distinct, read, replay
from meshwright.verify.collectives.record import Writer

HERE = "tests/verify/test_verify_one_rank.py"
ROOT = Path(__file__).parents[2]


def calls_of(*calls: Call) -> Calls:
    return Calls({call: Origin("model.py:12", 1, "some layout") for call in calls}, groups=3)


def alone(calls: Calls, backend: str = "gloo", eager: bool = False) -> Outcome:
    """A replay in its own process."""
    return run_ranks(_replayed, 1, calls, backend, eager)[0]


def _replayed(calls: Calls, backend: str, eager: bool) -> Outcome:
    dist.destroy_process_group()
    return replay(calls, backend, eager)


def many_kinds() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(8.0).view(4, 2)
    parts = [torch.empty(4, 2) for _ in range(size)]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    for _ in range(3):
        dist.all_reduce(x.clone(), dist.ReduceOp.MAX)
    dist.all_reduce(x.to(torch.bfloat16), async_op=True).wait()
    dist.broadcast(x.clone(), 1)
    dist.reduce(x.clone(), 1)
    dist.all_gather(parts, x)
    gather(torch.empty(8, 2), x)
    scatter(torch.empty(2, 2), x)
    dist.all_to_all_single(torch.empty(4, 2), x)
    sent = [1, 3] if rank == 0 else [0, 4]
    dist.all_to_all_single(torch.empty((1, 7)[rank], 2), x, [[1, 0], [3, 4]][rank], sent)
    dist.all_to_all_single(torch.empty(0, 2), torch.empty(0, 2), [0, 0], [0, 0])
    dist.gather(x, parts if rank == 0 else None, 0)
    dist.scatter(torch.empty(4, 2), parts if rank == 0 else None, 0)
    dist.barrier()
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(3))
    dist.all_gather_object([None] * size, "text")
    other = 1 - rank
    messages = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty(4, 2), other)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    dist.new_group([rank], use_local_synchronization=True)


def test_each_distinct_call_is_replayed_once(tmp_path: Path) -> None:
    run_ranks(many_kinds, 2, record=tmp_path)
    calls = distinct(read(tmp_path, 2))
    kinds = {call.kind: call for call in calls.origins}
    assert calls.on_cpu == 4 and calls.groups == 2  # objects of two ranks; the world and a group of its own
    whole = (Spec("float32", (4, 2), True, "cuda"),)
    assert kinds["all_gather_into_tensor"] == Call("all_gather_into_tensor", whole, whole)
    half = (Spec("float32", (2, 2), True, "cuda"),)
    assert kinds["reduce_scatter_tensor"] == Call("reduce_scatter_tensor", half, half, "SUM")
    assert kinds["gather"].outputs == whole and kinds["scatter"].inputs == whole  # on roots and others alike
    assert kinds["messages"].inputs == whole * 2
    first = next(iter(calls.origins))
    assert (first.kind, first.reduce, calls.origins[first].times) == ("all_reduce", "MAX", 6)
    assert HERE in calls.origins[first].site
    exchanges = [call for call in calls.origins if call.kind == "all_to_all_single"]
    assert [(call.splits, call.inputs[0].shape[0]) for call in exchanges] == [(False, 4), (True, 4), (True, 0)]

    outcome = alone(calls)
    assert outcome.refused == [] and outcome.groups >= 6
    assert outcome.not_replayed == {"this library does not send to the same rank": 1}
    assert outcome.accepted == len(calls.origins) - 1 == 14


def test_a_planted_call_that_the_library_refuses_is_reported_with_its_site(tmp_path: Path) -> None:
    writer, place = Writer(tmp_path, 0), "model.py:12"
    writer.created("world", (0, 1), place)
    for dtype, reduce in (("float32", "SUM"), ("uint16", "SUM"), ("float32", "NO_SUCH"), ("float32", "MAX")):
        tensors = ((dtype, (4,), True, "cpu"),)
        call = (("group", "world"), ("kind", "all_reduce"), ("inputs", tensors), ("reduce", reduce), ("site", place))
        writer.issued(call, None)
    outcome = alone(distinct(read(tmp_path, 1)).named("llama · tp 2"))
    assert outcome.accepted == 2 and not outcome.ok  # what comes after a refusal is still tried
    assert [sentence.partition(": ")[0] for sentence in outcome.refused] == [
        "all_reduce SUM uint16 [4] at model.py:12 (llama · tp 2)",
        "all_reduce NO_SUCH float32 [4] at model.py:12 (llama · tp 2)",
    ]


def test_what_cannot_be_issued_by_one_rank_is_counted_and_strided_tensors_stay_strided() -> None:
    strided = Spec("float32", (4, 2), False, "cuda")
    calls = calls_of(
        Call("recv_anysource", outputs=(strided,)),
        Call("monitored_barrier"),
        Call("all_to_all_single", (strided,), (strided,)),
        Call("broadcast", (strided,)),  # gloo takes this one
    )
    outcome = alone(calls)
    assert outcome.not_replayed == {
        "recv_anysource has no form for one rank": 1,
        "monitored_barrier has no form for one rank": 1,
    }
    [sentence] = outcome.refused
    assert "contiguous" in sentence and "model.py:12 (some layout)" in sentence


def test_a_library_that_returns_something_else_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    issue = import_module("meshwright.verify.collectives.issue")
    monkeypatch.setitem(issue._ISSUES, "all_gather", lambda *given: None)
    here = (Spec("float32", (4,), True, "cuda"),)
    outcome = alone(calls_of(Call("all_gather", here, here)))
    [sentence] = outcome.refused
    assert sentence == "all_gather float32 [4] at model.py:12 (some layout): it did not return what it was given"


@pytest.mark.gpu
def test_nccl_accepts_messages_to_the_same_rank_and_refuses_what_it_cannot_reduce() -> None:
    here = (Spec("bfloat16", (4, 2), True, "cuda"),)
    calls = calls_of(Call("messages", here * 2), Call("all_reduce", (Spec("int16", (4,), True, "cuda"),), reduce="SUM"))
    for eager in (False, True):
        # Ranks are forked, which a process that has used the GPU cannot do, and tests before this one have used it.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            outcome = fresh.submit(alone, calls, "cpu:gloo,cuda:nccl", eager).result()
        assert outcome.accepted == 1 and len(outcome.refused) == 1 and "int16" in outcome.refused[0].lower()


def split_a_later_world() -> int:
    one_rank: Any = import_module("meshwright.verify.collectives.one_rank")
    dist.destroy_process_group()  # torch before 2.15 tells only the first of gloo's groups its ranks
    with one_rank._alone("gloo", torch.device("cpu"), eager=False):
        world: Any = dist.group.WORLD
        part = world.split_group([0], timeout=one_rank.TIMEOUT, group_name="part")
        dist.all_reduce(torch.ones(1), group=part)
        return int(part.size())


def test_a_world_after_another_one_can_be_split() -> None:
    assert run_ranks(split_a_later_world, 1) == [1]


# ---- The command ----


@pytest.mark.thorough
def test_the_command_runs_it_where_there_is_a_gpu(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = import_module("meshwright.verify.gpu_replay")
    monkeypatch.setattr(gpu, "BACKEND", "gloo")
    monkeypatch.setattr(gpu, "has_gpu", lambda: True)
    job = ("verify", "demo", "--set", "layout.dp_replicate=2", "--steps", "1", "--collectives")
    answer = json.loads(cli(*job, "--json").out)
    assert answer["nccl"]["ok"] and answer["nccl"]["library"] == "gloo" and answer["nccl"]["refused"] == []
    assert answer["nccl"]["accepted"] > 3 and answer["nccl"]["groups"] > 3

    issue = import_module("meshwright.verify.collectives.issue")

    def refuse(*given: Any) -> None:
        raise RuntimeError("unsupported\nmore")

    monkeypatch.setitem(issue._ISSUES, "all_reduce", refuse)
    matrix = ("verify", "--matrix", "quick", "--only", "llama · dp_replicate 2, int8")
    bad = cli(*matrix)
    assert bad.code == 1 and "1 of 1 layouts equal" in bad.out
    place = r"at meshwright/\S+:\d+ \(llama · dp_replicate 2, int8\): unsupported\n"
    assert re.search(rf"NCCL refuses all_reduce SUM float64 \[\d+\] {place}", bad.out), bad.out
    unasked = cli(*matrix, "--no-collectives")
    assert unasked.code == 0 and "NCCL" not in unasked.out


# ---- The benchmark ----


def script() -> Any:
    spec = spec_from_file_location("nccl_one", ROOT / "benchmarks" / "nccl_one.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_of_the_matrix_is_as_written_and_replays(tmp_path: Path) -> None:
    nccl_one = script()
    text = nccl_one.FILE.read_text()
    calls, about = nccl_one.from_text(text)
    assert nccl_one.as_text(calls, about) == text and len(text) < 200_000
    assert merged([calls]) == calls
    result = tmp_path / "result.json"
    assert run_ranks(_replayed_file, 1, nccl_one, result) == [True]
    outcome = json.loads(result.read_text())["ways"]["connected at first use"]
    messages = sum(call.kind == "messages" for call in calls.origins)
    assert outcome["refused"] == [] and outcome["accepted"] == len(calls.origins) - messages > 100


def _replayed_file(nccl_one: Any, result: Path) -> bool:
    dist.destroy_process_group()
    return nccl_one.replay_file(nccl_one.FILE, result, "gloo")


@pytest.mark.thorough
def test_a_layout_is_recorded_into_a_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nccl_one, out = script(), tmp_path / "calls.json"
    for _ in range(2):
        nccl_one.record(tmp_path / "kept", out, "llama · zero 3, offload activations", math.inf)
    assert capsys.readouterr().out.count("  bf16  llama · zero 3, offload") == 1
    calls, about = nccl_one.from_text(out.read_text())
    assert (about["recorded_layouts"], about["recorded_runs"], about["runs_missing"]) == (1, 2, 0)
    dtypes = {spec.dtype for call in calls.origins for spec in call.inputs}
    assert {"bfloat16", "float32", "float64"} <= dtypes and calls.groups > 2
    assert all(origin.layout.startswith("llama · zero 3, offload activations, ") for origin in calls.origins.values())
