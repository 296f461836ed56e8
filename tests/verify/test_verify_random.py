"""Drawn jobs: what is drawn, what an answer is called, and that wrong ones are seen."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from meshwright.data import loader
from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.layout import ranks_of
from meshwright.pipeline import SCHEDULES
from meshwright.verify import Answer, Check, Draw, RankError, draw, features_of, run_draws, sample
from meshwright.verify.generate import RANKS
from meshwright.verify.generate_model import FAMILIES
from meshwright.verify.sample import fault_of, subject_of

check = sys.modules["meshwright.verify.check"]  # the room gives this name to the function in it

MANY = [draw(5, number) for number in range(1, 801)]


def test_a_draw_is_a_function_of_its_two_numbers() -> None:
    assert [draw(5, number).table for number in (1, 400, 800)] == [MANY[n - 1].table for n in (1, 400, 800)]
    assert draw(5, 1).table != draw(6, 1).table != draw(6, 2).table


def test_everything_is_drawn_and_most_of_it_runs() -> None:
    jobs = [drawn.job for drawn in MANY if drawn.refusal is None]
    assert 0.75 <= len(jobs) / len(MANY) <= 0.95

    def seen(value: Callable[[Any], Any]) -> set[Any]:
        return {value(job) for job in jobs}

    assert {drawn.family for drawn in MANY} == set(FAMILIES)
    assert seen(lambda job: job.layout.schedule if job.layout.pp > 1 else None) == {None, *SCHEDULES}
    assert seen(lambda job: job.layout.cp_method if job.layout.cp > 1 else None) == {
        None, "ring", "allgather", "ulysses",
    }  # fmt: skip
    assert seen(lambda job: job.layout.zero_stage) == {0, 1, 2, 3}
    assert seen(lambda job: job.layout.compress) == {"none", "topk", "fp16", "bf16", "int8", "powersgd"}
    assert seen(lambda job: job.optimizer.name) == {"adamw", "sgd", "lion", "adafactor", "muon"}
    assert seen(lambda job: job.precision.optimizer_states) == {"fp32", "bf16", "int8"}
    assert seen(lambda job: job.data.packing) == {"concatenate", "best-fit", "none"}
    assert seen(lambda job: type(job.memory.recompute).__name__) == {"str", "Segments", "Every", "Budget"}
    assert {kind for job in jobs for kind in job.memory.offload} == {"optimizer", "params", "activations"}
    assert seen(lambda job: job.layout.split is None) == seen(lambda job: job.run.compiles) == {True, False}
    assert seen(lambda job: ranks_of(job.layout)) >= set(RANKS)
    adapters = [job.model.adapter for job in jobs if job.model.adapter is not None]
    assert {(adapter.base, adapter.dora) for adapter in adapters} == set(
        product(("compute", "nf4", "int8"), (True, False))
    )
    assert {adapter.rslora for adapter in adapters} == {adapter.dropout > 0 for adapter in adapters} == {True, False}
    assert {job.preference.loss for job in jobs if job.prefers} == {"dpo", "ipo", "orpo"}
    assert any(job.prefers and job.model.adapter is not None for job in jobs)


def test_every_refusal_says_field_value_and_remedy() -> None:
    refusals = [(drawn.refusal, drawn.table) for drawn in MANY if drawn.refusal is not None]
    assert [refusal for refusal, table in refusals if fault_of(refusal, table) is not None] == []
    assert len({subject_of(refusal) for refusal, _ in refusals}) >= 20


@pytest.mark.parametrize(
    ("refusal", "fault"),
    [
        ("layout.tp = 3 does not divide model.heads = 4; set layout.tp to 2\nand more", "more than one sentence"),
        ("the heads do not divide; lower the degree", "no field with its value"),
        ("layout.tp is too large; lower it", "no field with its value"),
        ("layout.tp = 3 does not divide model.heads = 4", "no remedy"),
    ],
)
def test_a_poor_refusal_is_found(refusal: str, fault: str) -> None:
    assert fault_of(refusal, MANY[0].table) == fault


def test_a_remedy_that_does_not_help_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = next(drawn for drawn in MANY if "set layout.zero = 2" in (drawn.refusal or ""))
    assert refused.refusal is not None and fault_of(refused.refusal, refused.table) is None
    monkeypatch.setattr(sample, "refusal_of", lambda table, name: refused.refusal)
    assert fault_of(refused.refusal, refused.table) == "the remedy is refused with the same error"


def two_ranks(**data: Any) -> Draw:
    """A drawn job of two sharded ranks that takes a second, with these data settings."""
    return next(
        drawn
        for drawn in MANY
        if drawn.refusal is None
        and drawn.job.layout.dp_shard == 2 == ranks_of(drawn.job.layout)
        and not drawn.job.run.compiles
        and drawn.job.model.layers < 3
        and all(getattr(drawn.job.data, name) == value for name, value in data.items())
    )


def answer(drawn: Draw) -> Answer:
    [found] = run_draws([drawn])
    return found


def in_ranks(act: Callable[[], None]) -> Callable[..., Any]:
    """Observe as usual, but let the ranks of a layout do something first."""
    observe = check.observe

    def observe_after(*args: Any) -> Any:
        if os.environ["WORLD_SIZE"] != "1":
            act()
        return observe(*args)

    return observe_after


def fail() -> None:
    raise RuntimeError("a mistake of ours")


def refuse() -> None:
    raise UserError("layout.tp = 2 is not known here; set layout.tp = 1")


@pytest.mark.parametrize(
    ("act", "outcome", "told"),
    [
        (fail, "crashed", "a mistake of ours"),
        (refuse, "refused in ranks", "layout.tp = 2 is not known here"),
        (lambda: time.sleep(60), "hung", "did not answer within 3 s"),
    ],
)
def test_what_goes_wrong_in_ranks_has_its_name(
    act: Callable[[], None], outcome: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "observe", in_ranks(act))
    drawn = two_ranks(workers=0)
    if outcome == "hung":
        check.reference(drawn.job, "float64")
        monkeypatch.setattr(check, "TIMEOUT_S", 3.0)
    found = answer(drawn)
    assert found.outcome == outcome and told in (found.sentence or "")
    assert found.wrong == (outcome != "refused in ranks")


def test_a_failure_of_one_draw_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = two_ranks(workers=0)

    def refer(self: Any) -> Any:
        raise RankError("no reference")

    monkeypatch.setattr(Check, "refer", refer)
    refused = next(drawn for drawn in MANY if drawn.refusal is not None)
    assert [(one.outcome, one.draw) for one in run_draws([drawn, refused])] == [
        ("refused", refused),
        ("crashed", drawn),
    ]


@pytest.mark.thorough
def test_workers_that_read_wrongly_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = two_ranks(workers=1)
    assert answer(drawn).outcome == "equal"
    make_parcel = loader.make_parcel

    def swapped(samples: Any, *rest: Any, **named: Any) -> Any:
        first, *others = list(samples)
        tokens = first.tokens_S[::-1].copy()
        return make_parcel(iter([replace(first, tokens_S=tokens), *others]), *rest, **named)

    monkeypatch.setattr(loader, "make_parcel", swapped)
    assert answer(drawn).outcome == "not equal"


@pytest.mark.parametrize("change", [{"mask_documents": None}, {"packing": "best-fit"}, {"packing": "none"}])
def test_how_documents_are_read_is_part_of_what_is_compared(change: dict[str, Any]) -> None:
    drawn = two_ranks(packing="concatenate", format="text")
    data = drawn.job.data
    if "mask_documents" in change:
        change = {"mask_documents": not data.mask_documents}
    other = drawn.job.model_copy(update={"data": data.model_copy(update=change)})
    assert check.reference(drawn.job, "float64").losses != check.reference(other, "float64").losses


@pytest.mark.thorough
def test_a_wrong_draw_prints_its_job_and_exits_1(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn = two_ranks(workers=0)
    divide = FSDPModule.set_gradient_divide_factor
    monkeypatch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: divide(self, 2 * factor))
    chosen = ("verify", "--random", "800", "--seed", "5", "--only", str(drawn.number))
    result = cli(*chosen)
    assert result.code == 1
    assert "NOT EQUAL" in result.out and "first difference: gradient of" in result.out
    assert f"1 drawn, wrong: {drawn.number}" in result.out
    repeat = f"# reproduce with: meshwright verify --random {drawn.number} --seed 5 --only {drawn.number}\n"
    job_file, _ = result.out[result.out.index(repeat) :].split("\n    1  not equal")
    (tmp_path / "again.toml").write_text(job_file)
    assert load_job(str(tmp_path / "again.toml")).job == drawn.job
    found = json.loads(cli(*chosen, "--json").out)
    assert found["equal"] is False and found["counts"]["not equal"] == 1
    assert found["layouts"][0]["why"].startswith("first difference: gradient of")


def test_json_has_stable_keys(cli) -> None:
    refused = next(drawn for drawn in MANY if drawn.refusal is not None)
    result = cli("verify", "--random", "800", "--seed", "5", "--only", str(refused.number), "--json")
    found = json.loads(result.out)
    assert result.code == 0 and set(found) == {
        "equal", "seed", "dtype", "seconds", "counts", "features", "refused", "layouts",
    }  # fmt: skip
    assert set(found["counts"]) == {
        "equal", "vacuous", "refused", "refused in ranks", "not equal", "breaks the contract", "crashed", "hung",
        "refused badly",
    }  # fmt: skip
    [layout] = found["layouts"]
    assert set(layout) == {"number", "name", "outcome", "why", "worst", "seconds", "job"}
    assert layout["why"] == refused.refusal and found["refused"] == {subject_of(layout["why"]): 1}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--random", "3", "--only", "4"), '--only "4" is not the number of a drawn job; give one from 1 to 3'),
        (("--random", "3", "--only", "tp 2"), '--only "tp 2" is not the number of a drawn job'),
        (("--random", "3", "--matrix", "quick"), "not --matrix and --random; give one of them"),
        (("--layer", "mine.py:Mine", "--only", "4"), "give --matrix or --random with it"),
    ],
)
def test_mistakes_exit_2_in_one_sentence(cli, arguments: tuple[str, ...], sentence: str) -> None:
    result = cli("verify", *arguments)
    assert result.code == 2 and sentence in result.err


def test_models_that_read_pictures_are_drawn_with_every_kind_of_layout() -> None:
    jobs = [drawn.job for drawn in MANY if drawn.refusal is None and "vision" in drawn.table["model"]]
    assert len(jobs) > 40
    assert {job.model.vision.kind for job in jobs if job.model.vision} == {"clip", "siglip"}
    assert len({job.model.vision.train for job in jobs if job.model.vision}) == 4
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
        assert any(getattr(job.layout, axis) > 1 for job in jobs)
    drawn = next(drawn for drawn in MANY if "vision" in drawn.table["model"])
    assert "vision " in drawn.name and "kind " in drawn.name


def test_every_feature_of_a_model_is_drawn_and_counted() -> None:
    jobs = [drawn.job for drawn in MANY if drawn.refusal is None]
    counts = Counter(name for job in jobs for name in features_of(job))
    few = 0.01 * len(jobs)
    for name in (
        *("experts", "softmax scores", "sigmoid scores", "expert groups", "shared experts", "expert capacity"),
        *("balance rate", "expert biases", "dense first layers", "expert parallelism", "one expert per token"),
        *("MLA", "sinks", "alternating windows", "sliding window", "rope scaling yarn", "rope scaling llama3"),
        *("adapters, base compute", "adapters, base nf4", "adapters, base int8", "DoRA", "dpo", "ipo", "orpo"),
        *("vision clip", "vision siglip", "audio", "frozen parts beside an encoder"),
        *("extra_tokens 1", "extra_tokens 2", "int8 states", "streaming", "compression topk"),
    ):
        assert counts[name] >= few, name
    pairs = Counter(pair for job in jobs for pair in combinations(sorted(set(features_of(job))), 2))
    for pair in (("MLA", "experts"), ("adapters, base compute", "experts"), ("audio", "experts"), ("dpo", "experts")):
        assert pairs[pair] > 0, pair


def test_a_streamed_job_reads_the_same_in_every_layout() -> None:
    assert answer(two_ranks(stream=True, mask_documents=True)).outcome == "equal"


def test_a_proof_that_is_vacuous_by_chance_is_no_error(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = two_ranks(workers=0)
    monkeypatch.setattr(check, "unexercised", lambda job, zeros: ["layers.0.ffn.up.weight"])
    result = cli("verify", "--random", "800", "--seed", "5", "--only", str(drawn.number), "--json")
    summary = json.loads(result.out)
    assert result.code == 0 and summary["equal"] is True and summary["counts"]["vacuous"] == 1
    [layout] = summary["layouts"]
    assert layout["outcome"] == "vacuous" and "only rounding errors arrive as the gradient of" in layout["why"]
    assert summary["features"]["2 ranks"] == 1
