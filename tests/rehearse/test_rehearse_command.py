"""`meshwright rehearse` and `meshwright.rehearse`: what they report, refuse and save."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright
from meshwright.amounts import size
from meshwright.job import load_job
from meshwright.parallel import World
from meshwright.rehearse import Rehearsal, rank
from meshwright.rehearse.folder import read_rehearsal
from meshwright.rehearse.rank import Settings
from meshwright.rehearse.run import LIMITS
from meshwright.rehearse.words import shortage

SHORT = ("--steps", "1")


@pytest.fixture
def pipeline(tiny_job: Path) -> Path:
    text = tiny_job.read_text().replace("micro_batch = 2", "micro_batch = 1")
    tiny_job.write_text(text + "\n[layout]\npp = 2\ndp_shard = 2\n")
    return tiny_job


@pytest.mark.thorough
def test_one_rank_of_each_stage_is_measured_and_saved(cli: Any, pipeline: Path, tmp_path: Path) -> None:
    done = cli("rehearse", "job.toml", "--each-stage", *SHORT, "--out", "found", "--json", "--profile")
    assert done.code == 0, done.err
    found = Rehearsal.from_json(json.loads(done.out))
    assert Rehearsal.from_json(json.loads((tmp_path / "found/rehearsal.json").read_text())) == found
    assert (found.world, found.device, found.limits) == (4, "CPU", LIMITS)
    first, last = found.ranks
    assert [(one.rank, one.pipeline_rank, one.stages, one.alike) for one in found.ranks] == [
        (0, 0, (0,), 2), (2, 1, (1,), 2),
    ]  # fmt: skip
    assert set(first.actions_s) == {"F0", "B0"} and set(last.actions_s) == {"F1", "B1"}
    assert first.step_s > 0 and min(first.phases_s.values()) >= 0 and first.kernels is not None
    assert first.memory is not None and first.memory.planned_bytes is not None
    assert first.memory.allocated_bytes == sum(first.memory.by_kind.values()) > first.memory.by_kind["weights"] > 0
    sends = [message for message in first.messages if message.kind == "send"]
    assert [(message.axis, message.ranks, message.count) for message in sends] == [("pp", (0, 2), 2)]
    assert {message.axis for message in first.messages} == {"pp", "dp_shard", "world"}
    assert first.checkpoint_bytes is not None and first.checkpoint_bytes > first.memory.by_kind["optimizer states"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rank", "4"], "--rank 4 is not in the job's world of 4 ranks; give one from 0 to 3"),
        (["--rank", "1", "--each-stage"], "--rank 1 and --each-stage exclude each other"),
        (["--set", "layout.pp=1", "--set", "layout.dp_shard=1"], "nothing to rehearse; meshwright bench"),
        (["--cluster", "8xh100"], "layout needs 4 ranks, but the cluster has 8 GPUs"),
        (["--set", 'run.device="cuda:7"'], 'run.device = "cuda:7" is not available'),
        (
            ["--set", "layout.tp=2", "--set", "layout.async_tp=true", "--set", "run.compile=true"],
            "layout.async_tp = true sends through memory that GPUs share, and a rehearsal has one",
        ),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(cli: Any, pipeline: Path, words: list[str], sentence: str) -> None:
    done = cli("rehearse", "job.toml", *SHORT, *words)
    assert done.code == 2 and sentence in done.err, done.err


def test_data_that_is_elsewhere_is_replaced_and_checkpoints_left_out(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pipeline.parent)
    job = load_job("job.toml", ['data.sources=["nowhere"]']).job
    found = meshwright.rehearse(job, steps=1, rank=0, checkpoint=False)
    [warning] = found.warnings
    assert warning.startswith("tokens are synthetic, since the job's data cannot be read here: ")
    assert "nowhere" in warning
    assert found.ranks[0].checkpoint_bytes is None and found.ranks[0].checkpoint_s is None


TORCHS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.59 GiB is "
    "free. Of the allocated memory 76.50 GiB is allocated by PyTorch, and 15.77 MiB is reserved but unallocated."
)


def test_out_of_memory_is_a_result(cli: Any, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError(TORCHS)

    monkeypatch.setattr(rank, "run_measured", full)
    done = cli("rehearse", "job.toml", "--rank", "2", *SHORT, "--out", "found")
    assert done.code == 1 and "rank 2 of 4 (last stage) needs 78.5 GiB" in done.out, (done.out, done.err)
    [found] = Rehearsal.from_json(json.loads((tmp_path / "found/rehearsal.json").read_text())).ranks
    assert found.state == "out of memory" and found.needed_bytes == round(78.5 * 2**30 + 15.77 * 2**20)


MANY_WORDS = """
[model]
vocab_size = 16384
width = 32
layers = 2
heads = 4
kv_heads = 2
ffn_width = 48
tied = false

[data]
sources = ["builtin:synthetic"]
workers = 0

[batch]
sequence_length = 64
global_batch = 4
micro_batch = 1

[precision]
compute = "fp32"

[run]
compile = false

[layout]
pp = 2
dp_shard = 2
"""


def test_a_last_stage_that_is_too_large_by_its_logits_is_found_and_named(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stages have a table of all words and a layer; the first holds 7.2 MiB and the last 9.2."""
    from meshwright.rehearse import run

    monkeypatch.setattr(run, "_limit", lambda job, kind, target: 8 * 2**20)
    (tmp_path / "words.toml").write_text(MANY_WORDS)
    done = cli("rehearse", "words.toml", "--each-stage", *SHORT, "--cluster", "4xh100", "--out", "found")
    assert done.code == 1, done.err
    first, last = read_rehearsal(tmp_path / "found").ranks
    assert first.memory is not None and first.memory.allocated_bytes < 8 * 2**20 and first.state == "measured"
    assert last.memory is not None and last.needed_bytes == last.memory.allocated_bytes > 8 * 2**20
    named = f"rank 2 of 4 (last stage) needs {size(last.needed_bytes)}, more than a GPU of 4xh100 has"
    assert named in " ".join(done.out.split())


def test_memory_that_is_free_in_pieces_is_named() -> None:
    torchs = TORCHS.replace("15.77 MiB is reserved but", "3.02 GiB is reserved by PyTorch but")
    world = World(torch.device("cpu"), 0, 4)
    found = rank._out_of_memory(load_job("demo").job, world, 4, torch.OutOfMemoryError(torchs))
    assert found.needed_bytes == pytest.approx((76.5 + 3.02 + 2.0) * 2**30)
    named = shortage(found, Rehearsal(4, "4xh100", "NVIDIA H200", "2.13.0", (found,), None, (), ()))
    assert "rank 0 of 4 needs 81.5 GiB, more than a GPU of 4xh100 has" in named
    assert "3.02 GiB were free in pieces, none as large as the 2 GiB asked for: set PYTORCH_ALLOC_CONF=expand" in named
    plain = rank._out_of_memory(load_job("demo").job, world, 4, torch.OutOfMemoryError(TORCHS))
    assert "pieces" not in shortage(plain, Rehearsal(4, "", "NVIDIA H200", "2.13.0", (plain,), None, (), ()))


def test_what_does_not_fit_the_clusters_devices_is_run_again_to_say_what_it_needs(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device here may have more memory than those of the cluster."""
    from meshwright.rehearse import run

    monkeypatch.chdir(pipeline.parent)
    asked: list[int | None] = []
    whole = run.rehearse_apart

    def apart(job: Any, rank: int, alike: int, settings: Settings) -> Any:
        asked.append(settings.limit_bytes)
        found = whole(job, rank, alike, replace(settings, limit_bytes=None))
        if settings.limit_bytes is None:
            return found
        short = replace(found.rank, state="out of memory", needed_bytes=1000, memory=None)
        return replace(found, rank=short, limited=True)

    monkeypatch.setattr(run, "rehearse_apart", apart)
    found = run.rehearse(load_job("job.toml").job, rank=0, steps=1, cluster="4xh100")
    [one] = found.ranks
    assert asked[0] is not None and 70 * 2**30 < asked[0] < 80 * 2**30 and asked[1] is None
    assert one.state == "out of memory" and one.memory is not None and one.needed_bytes == one.memory.allocated_bytes
