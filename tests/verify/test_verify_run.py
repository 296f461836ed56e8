"""`verify JOB --run`: text that ends amid the run, legs in other layouts, and faults that nothing else would see."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from verify_jobs import matrix_lines

from meshwright.checkpoint import Checkpoint
from meshwright.data import Stream, batch, training_stream
from meshwright.data.order import window_of
from meshwright.data.streaming import StreamLoader
from meshwright.errors import UserError
from meshwright.job import Job, load_job
from meshwright.job.devices import Layout
from meshwright.launch.worker import run_quietly
from meshwright.layout import ranks_of, require_layout
from meshwright.parallel import World
from meshwright.train import held_out_batches, open_corpus, training_loader
from meshwright.verify import Comparison, Verdict, run_check, run_text
from meshwright.verify.run_plan import Leg, alone, as_run, legs_of, small_run

LINES = [line for line in matrix_lines() if line.through_train]
KEYS = {
    "equal", "job", "legs", "dtype", "steps", "seconds", "notes", "could_hide_errors", "first_wrong", "rows",
}  # fmt: skip


def small(**sections: dict[str, Any]) -> Job:
    """A line of the matrix as a run of four steps, changed."""
    job = LINES[0].job.model_dump() | {"layout": Layout().model_dump()}
    for section, fields in sections.items():
        job[section] = job[section] | fields
    return as_run(Job.model_validate(job), steps=4)[0]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_an_epoch_ends_amid_the_run_and_some_text_is_held_out(line: Any, tmp_path: Path) -> None:
    job = run_text.write_text(as_run(line.job, prepared=line.prepared)[0], tmp_path, line.prepared)
    corpus, samples = open_corpus(job), job.run.steps * job.batch.global_batch
    assert job.data.workers >= 1 and {path.name.partition("-")[0] for path in tmp_path.iterdir()} >= {"source"}
    assert sum(batch.valid_count() for batch in held_out_batches(job, corpus)) > job.batch.sequence_length
    if job.data.stream:
        assert corpus.flow is not None and corpus.flow.shards == run_text.STREAMED_FILES
        loader = training_loader(job, corpus, World(torch.device("cpu")))
        for _ in range(job.run.steps):
            next(loader)
        loader.close()
        assert isinstance(loader, StreamLoader) and all(cursor.turn > 0 for cursor in loader.cursors.values())
        return
    stream = training_stream(corpus, job.data, job.batch.sequence_length, job.run.seed)
    assert len(stream.parts) == (1 if job.data.weights is None else len(job.data.sources))
    assert all(epochs > 1.1 for epochs in stream.epochs(samples))


def test_a_job_keeps_its_kind_of_data() -> None:
    wanted = {"data.stream=true": "JSONL files, streamed", "data.sources=['a.jsonl']": "JSONL files"}
    for override, told in wanted.items():
        job = load_job("demo", [override, "data.mask_documents=true", "data.workers=5", "layout.tp=2"]).job
        made, changes = small_run(job)
        assert made.data.mask_documents and made.data.workers == 2 and made.data.stream == job.data.stream
        assert [change for change in changes if f"text: {told} generated for this check" in change.text]
        assert not [change for change in changes if change.hides]
    narrow = small_run(load_job("demo", ["precision.compute=bf16"]).job)[1]
    assert [change.text for change in narrow if change.hides] == [
        'precision.compute "bf16" → the format of the check; without --run it is checked in its own'
    ]
    weighted = load_job("demo", ["data.sources=['a', 'b', 'c', 'd']", "data.weights=[0, 0, 0, 1]"]).job
    assert small_run(weighted)[0].data.weights == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_legs_change_the_layout_and_come_back(line: Any) -> None:
    job = as_run(line.job)[0]
    first, other, single, last = legs_of(job)
    assert first.job == last.job == job and single.job == alone(job)
    assert other.job.layout not in (job.layout, Layout())
    assert other.job.layout.tp != job.layout.tp or job.layout.tp == 1
    assert [leg.start for leg in (first, other, single, last)] == [0, 2, 4, 6]
    for leg in (first, other, single, last):
        require_layout(leg.job, ranks_of(leg.job.layout))
        assert leg.job.batch.global_batch == job.batch.global_batch


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(UserError, match=r"--steps 3 is too few .*; give at least 4"):
        small_run(load_job("demo").job, steps=3)
    stale = ["layout.pp=2", "layout.schedule=pipedream", "batch.micro_batch=16"]
    with pytest.raises(UserError, match='"pipedream" computes with stale weights'):
        small_run(load_job("demo", stale).job)


def shortened(monkeypatch: pytest.MonkeyPatch, legs: Callable[[Job], list[Leg]]) -> None:
    monkeypatch.setattr(run_check, "legs_of", legs)


def first_leg(job: Job) -> list[Leg]:
    return legs_of(job)[:1]


def wrong(verdict: Verdict) -> str:
    assert verdict.ok is False and verdict.first_wrong is not None
    return f"{verdict.first_wrong.kind} of {verdict.first_wrong.name}"


@pytest.mark.thorough
def test_a_worker_that_forgets_what_others_read_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = batch.make_parcel
    monkeypatch.setattr(
        "meshwright.data.loader.make_parcel",
        lambda samples, ids, _, *rest, **named: whole(samples, ids, 0, *rest, **named),
    )
    shortened(monkeypatch, first_leg)
    assert wrong(run_check.check_run(small(layout={"dp_shard": 2}), run_quietly)) == "loss of dp_shard 2: step 1"


@pytest.mark.thorough
def test_a_stream_divided_by_a_ranks_own_count_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    made = StreamLoader.__init__
    monkeypatch.setattr(
        StreamLoader, "__init__", lambda self, *args, **named: made(self, *args, **(named | {"total": None}))
    )
    shortened(monkeypatch, first_leg)
    job = small(layout={"dp_shard": 2}, data={"stream": True})
    assert wrong(run_check.check_run(job, run_quietly)) == "loss of dp_shard 2: step 1"


@pytest.mark.thorough
def test_ranks_that_part_after_the_first_epoch_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(stream: Stream, sample: int) -> tuple[int, int]:
        windows = len(stream.parts[0])
        return 0, window_of(sample, windows, stream.seed + (sample >= windows) * int(os.environ["RANK"]))

    monkeypatch.setattr(Stream, "place", place)
    shortened(monkeypatch, first_leg)
    where = wrong(run_check.check_run(small(layout={"dp_shard": 2}), run_quietly))
    assert where == "loss of dp_shard 2: step 3", "the text ends in the third step"


@pytest.mark.thorough
def test_states_that_come_back_wrong_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As columns of what one process saved did: views, which the fused update reads as if they were contiguous."""
    read = Checkpoint.read

    def view(self: Checkpoint, name: str, box: Any) -> Any:
        found = read(self, name, box)
        return found.t().contiguous().t() if found.dim() == 2 and name.startswith("optimizer/") else found

    monkeypatch.setattr(Checkpoint, "read", view)
    shortened(monkeypatch, lambda job: [Leg(alone(job), 0), Leg(job, 1)])
    verdict = run_check.check_run(small(layout={"tp": 2}), run_quietly)
    assert wrong(verdict) == "evaluation of tp 2 from step 1: step 2", "behind the first update"
    assert {row.ok for row in verdict.rows if row.name.startswith("one process")} == {True}


@pytest.mark.thorough
def test_the_command(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shortened(monkeypatch, lambda job: [Leg(job, 0), Leg(alone(job), 2)])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    result = cli("verify", "demo", "--run", "--set", "layout.dp_replicate=2", "--dtype", "float64", "--json")
    answer = json.loads(result.out)
    assert result.code == 0 and answer["equal"] is True and set(answer) == KEYS, result.err
    assert {row["kind"] for row in answer["rows"]} == {"loss", "norm", "evaluation", "data", "weight", "state"}
    assert {row["bound"] for row in answer["rows"]} == {1e-9, 0.0}
    assert answer["legs"][0] == {"layout": "dp_replicate 2", "ranks": 2, "start": 0}
    assert list((tmp_path / "scratch").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} <= {"scratch", "cache"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--matrix", "quick", "--run"), "--run verifies a job, not --matrix; give a JOB with it"),
        (("demo", "--run", "--dtype", "bf16"), "--dtype bf16 has no error bounds for runs; use float64 or float32"),
        (("demo", "--run", "--steps", "2"), "--steps 2 is too few"),
        (("demo", "--run", "--set", "layout.tp=5"), "layout.tp = 5 does not divide"),
    ],
)
def test_mistakes_exit_2_in_one_sentence(cli, arguments: tuple[str, ...], sentence: str) -> None:
    result = cli("verify", *arguments)
    assert result.code == 2 and sentence in result.err and len(result.err.splitlines()) == 1


def test_a_run_that_is_not_equal_exits_1(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = Verdict(small(), "float32", [Comparison("loss", "tp 2: step 5", 0.02, 1e-5)], 1.0)
    monkeypatch.setattr(run_check, "check_run", lambda *_: verdict)
    result = cli("verify", "demo", "--run", "--set", "layout.dp_shard=2")
    assert result.code == 1 and "not equal: first difference is the loss of tp 2: step 5, off by 2.0e-02" in result.out
    assert "run   dp_shard 2, resumed at step 2 in tp 2, resumed at step 4 in one process" in result.out


PICTURES = """
[model]
vocab_size = 300
width = 32
layers = 2
heads = 4

[model.vision]
image_size = 32
patch = 8
width = 32
layers = 2
heads = 4
images = 2
train = ["projector", "decoder"]

[data]
sources = ["samples.tar"]

[data.fields.image]
kind = "image"
crop = "random"

[data.fields.clip]
kind = "video"

[batch]
sequence_length = 64
global_batch = 8
micro_batch = 4

[layout]
dp_shard = 2
"""


def with_pictures(tmp_path: Path) -> Job:
    (tmp_path / "job.toml").write_text(PICTURES)
    job, changes = small_run(load_job(str(tmp_path / "job.toml")).job, steps=4)
    assert [change.text for change in changes if change.hides] == ['data.fields.clip.kind "video" → "image"']
    return job


def test_samples_with_pictures_are_read_from_files_and_end_amid_the_run(tmp_path: Path) -> None:
    job = with_pictures(tmp_path)
    job = run_text.write_text(job.model_copy(update={"run": job.run.model_copy(update={"steps": 8})}), tmp_path, False)
    corpus = open_corpus(job)
    stream = training_stream(corpus, job.data, job.batch.sequence_length, job.run.seed)
    assert stream.epochs(8 * job.batch.global_batch)[0] > 1.1
    shown = [int((step.media.places_BKT[..., 0] >= 0).sum()) for step in held_out_batches(job, corpus)]
    assert sum(shown) > 0 and not list((tmp_path / "cache").glob("*.bmp"))


@pytest.mark.thorough
@pytest.mark.parametrize("broken", [False, True])
def test_crops_that_differ_by_rank_are_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: bool) -> None:
    if broken:
        keyed = Stream.read

        def read(self: Stream, sample: int) -> Any:
            found = keyed(self, sample)
            assert found.media is not None
            return found.with_media(found.media.keyed(sample + int(os.environ["WORLD_SIZE"])))

        monkeypatch.setattr(Stream, "read", read)
    shortened(monkeypatch, first_leg)
    verdict = run_check.check_run(with_pictures(tmp_path), run_quietly, dtype="float64")
    assert verdict.ok is not broken


def test_drawings_are_run_as_they_are() -> None:
    made, changes = small_run(load_job("vlm-tiny", ["layout.tp=2"]).job)
    assert made.data.sources == ("builtin:shapes",) and not [change for change in changes if change.hides]
    assert any("builtin:shapes as they are" in change.text for change in changes)
    made, changes = small_run(load_job("vlm-tiny", ['data.sources=["builtin:synthetic"]']).job)
    assert made.data.sources == ("builtin:shapes",)
    assert "data.sources builtin:synthetic → builtin:shapes" in [change.text for change in changes]
