"""The asynchronous pipeline as a run: what is refused, versions of the weights, rows, bad steps, stopping."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.data import Corpus
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import ranks_of, require_layout
from meshwright.parallel import build, join_world
from meshwright.train import Silent, make_trainer, windows
from meshwright.verify import run_ranks
from meshwright.verify.documents import UnequalDocuments


def job(pp: int = 2, *, layers: int | None = None, steps: int = 6, every: int = 0, **sections: Any) -> Job:
    described: dict[str, Any] = {
        "model": {"vocab_size": 53, "width": 16, "layers": layers or pp, "heads": 2, "kv_heads": 2, "ffn_width": 24},
        "batch": {"sequence_length": 16, "global_batch": 2, "micro_batch": 2},
        "layout": {"pp": pp, "schedule": "pipedream"},
        "data": {"sources": ["builtin:synthetic"], "workers": 0},
        "evaluation": {"every_steps": every, "batches": 2, "sample_tokens": 0},
        "optimizer": {"lr": 1e-2},
        "run": {"steps": steps, "device": "cpu"},
    }
    for section, values in sections.items():
        described[section] = described.get(section, {}) | values
    return Job.model_validate(described)


class Memory(Silent):
    """Recorder and progress that remember, in order."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})


def on_rank(
    given: Job, change: Callable[[Any], None], stop: Callable[[], bool] = lambda: False
) -> tuple[Memory, str, dict[str, torch.Tensor]]:
    """Train on this rank; what was recorded, how it ended, and how far each of its weights moved."""
    world = join_world(given, torch.device("cpu"))
    engine, weights = build(given, world)
    memory = Memory()
    few = UnequalDocuments(given.model.vocab_size, 65, seed=0)  # so few tokens can be learned by heart
    training = make_trainer(given, Corpus(None, few, few, None), engine, weights, memory, memory, world)
    change(training)
    before = {name: master.detach().clone() for name, master in weights.masters.items()}
    outcome = training.run(stop)
    moved = {name: (master.detach() - before[name]).abs().max() for name, master in weights.masters.items()}
    return memory, outcome.reason, moved


def train(given: Job, change: Callable[[Any], None] = lambda training: None, **options: Any) -> list[Any]:
    return run_ranks(on_rank, ranks_of(given.layout), given, change, *options.values(), timeout_s=60.0)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"batch": {"micro_batch": 1}}, r"batch.micro_batch = 1 makes 2 of them per step; set batch.micro_batch = 2"),
        ({"layout": {"dp_replicate": 2}, "batch": {"global_batch": 4}}, r"layout.dp_replicate = 2; set it to 1"),
        ({"layout": {"dp_shard": 2}, "batch": {"global_batch": 4}}, r"layout.dp_shard = 2; set it to 1"),
        ({"layout": {"tp": 2}}, r"layout.tp = 2; set it to 1"),
        ({"layout": {"cp": 2}}, r"layout.cp = 2; set it to 1"),
        ({"model": {"tied": True}}, r"model.tied = true cannot keep .*; set model.tied = false"),
        ({"run": {"compile": True}}, r"run.compile = true; set run.compile = false"),
        ({"layout": {"virtual_stages": 2}}, r"layout.virtual_stages = 2 does not work with"),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_one_sentence(sections: dict[str, Any], sentence: str) -> None:
    given = job(**sections)
    with pytest.raises(UserError, match=sentence) as caught:
        require_layout(given, ranks_of(given.layout))
    assert "\n" not in str(caught.value) and 'layout.schedule = "pipedream"' in str(caught.value)


def test_a_single_rank_trains_as_ever() -> None:
    [(memory, reason, _)] = train(job(1, steps=2, layers=2, batch={"micro_batch": 1}))
    assert reason == "finished" and [row["step"] for row in memory.rows] == [1, 2]


def test_windows_end_at_evaluations_after_a_hundred_steps_and_with_the_run() -> None:
    assert list(windows(job(steps=250))) == [range(1, 101), range(101, 201), range(201, 251)]
    assert list(windows(job(steps=7, every=0))) == [range(1, 8)]
    assert list(windows(job(steps=7, every=3))) == [range(1, 4), range(4, 7), range(7, 8)]
    assert list(windows(job(steps=230, every=120)))[:2] == [range(1, 101), range(101, 121)]


@pytest.mark.parametrize(("pp", "steps", "most"), [(3, 6, [3, 2, 1]), (3, 2, [2, 2, 1]), (2, 1, [1, 1])])
def test_a_rank_keeps_as_many_versions_as_ranks_are_left_and_no_more(pp: int, steps: int, most: list[int]) -> None:
    for memory, _, _ in train(job(pp, steps=steps)):
        assert memory.events[-1] == {"kind": "weight_versions", "most": most}


def _count_versions_in_memory(training: Any) -> None:
    """How many of all versions of one parameter are alive after the second update and after the last."""
    training.recorder.counted = []
    weights, update = training.weights, training._backward_and_update
    refresh, versions = weights.refresh, []

    def remember() -> None:
        name = next(name for name in weights.masters if name.endswith("ffn.down.weight"))
        versions.append(weakref.ref(weights.newest.tensors[name]))

    def refresh_and_remember() -> None:
        refresh()
        remember()

    def counting(step: int, counts: Any) -> Any:
        result = update(step, counts)
        if step in (2, training.job.run.steps):
            training.recorder.counted.append(sum(version() is not None for version in versions))
        return result

    remember()
    weights.refresh, training._backward_and_update = refresh_and_remember, counting


def test_versions_nobody_needs_are_let_go_of() -> None:
    for rank, (memory, _, _) in enumerate(train(job(3, steps=4), _count_versions_in_memory)):
        assert memory.counted == [3 - rank, 1]  # the pipeline is full, then empty


def test_all_ranks_record_the_same_rows_with_the_usual_keys() -> None:
    asynchronous = [memory for memory, _, _ in train(job(steps=5, every=3))]
    usual = job(steps=5, every=3, layout={"schedule": "1f1b"})
    [(plain, _, _), _] = train(usual)
    assert [list(row) for row in asynchronous[0].rows] == [list(row) for row in plain.rows]
    assert [row["lr"] for row in asynchronous[0].rows if "lr" in row] == [r["lr"] for r in plain.rows if "lr" in r]
    kept = ("step", "loss", "grad_norm", "lr", "tokens", "val_loss")
    first, second = ([{key: row.get(key) for key in kept} for row in memory.rows] for memory in asynchronous)
    assert first == second
    losses = [row["loss"] for row in plain.rows if "loss" in row]
    assert first[1]["loss"] == pytest.approx(losses[0], rel=1e-6)  # the first step knows no staleness


@pytest.mark.thorough
def test_it_learns_over_a_long_window_and_messages_do_not_pile_up() -> None:
    def watch(training: Any) -> None:
        outboxes = (training.engine._to_next, training.engine._to_previous)
        training.recorder.waiting = []
        record = training._record
        training._record = lambda *row: (
            training.recorder.waiting.append(max(len(box._under_way) for box in outboxes)),
            record(*row),
        )

    [(memory, _, _), _] = train(job(steps=60), watch)
    losses = [row["loss"] for row in memory.rows if "loss" in row]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert max(memory.waiting) <= 8


def _bad_gradient_of(name: str) -> Callable[[Any], None]:
    """On the one rank that holds the parameter; what it hands on to the stage before is sound."""

    def spoil(training: Any) -> None:
        collect = training.weights.collect_gradients

        def spoiled() -> None:
            collect()
            if name in training.weights.masters:
                training.weights.masters[name].grad[0, 0] = float("nan")

        training.weights.collect_gradients = spoiled

    return spoil


def _bad_weight_on_the_last_rank(training: Any) -> None:
    if training.world.rank == training.world.size - 1:
        with torch.no_grad():
            training.weights.masters["head.weight"].fill_(float("nan"))
        training.weights.refresh()


@pytest.mark.thorough
def test_a_bad_step_stops_the_run_with_its_sentence() -> None:
    for change in (_bad_gradient_of("embed.weight"), _bad_gradient_of("head.weight"), _bad_weight_on_the_last_rank):
        with pytest.raises(UserError, match=r"step 1 has loss .* and gradient norm nan; lower optimizer.lr"):
            train(job(3), change)


def test_a_skipped_step_is_skipped_by_its_stage_and_those_before_it() -> None:
    skip: dict[str, Any] = {"run": {"on_bad_step": "skip"}}
    (memory, _, first), (_, _, last) = train(job(steps=2, **skip), _bad_gradient_of("embed.weight"))
    assert max(first.values()) == 0.0 and min(last.values()) > 0.0
    assert [(event["step"], event["policy"]) for event in memory.events if event["kind"] == "bad_step"] == [
        (1, "skip"),
        (2, "skip"),
    ]
    (_, _, first), (_, _, last) = train(job(steps=2, **skip), _bad_gradient_of("head.weight"))
    assert max(first.values()) == max(last.values()) == 0.0
    _, (_, _, last) = train(job(steps=1, run={"on_bad_step": "keep"}), _bad_weight_on_the_last_rank)
    assert last["layers.1.ffn.down.weight"].isnan()


def _asked_on_rank_one() -> bool:
    return torch.distributed.get_rank() == 1


def test_a_wish_to_stop_on_one_rank_ends_all_at_the_end_of_the_window() -> None:
    for memory, reason, _ in train(job(steps=9, every=4), stop=_asked_on_rank_one):
        assert reason == "interrupted"
        assert [row["step"] for row in memory.rows] == [0, 1, 2, 3, 4, 4]


def test_versions_are_in_the_compute_format_and_masters_are_not() -> None:
    def look(training: Any) -> None:
        masters, newest = training.weights.masters, training.weights.newest.tensors
        assert {master.dtype for master in masters.values()} == {torch.float32}
        assert {tensor.dtype for tensor in newest.values()} == {torch.bfloat16}

    given = job(steps=3, precision={"compute": "bf16"}, batch={"global_batch": 1, "micro_batch": 1})
    for memory, reason, moved in train(given, look):
        assert reason == "finished" and min(moved.values()) > 0.0
        assert memory.rows[0]["loss"] == pytest.approx(4.0, abs=0.5)
