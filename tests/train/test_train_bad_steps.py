"""Bad numbers: spikes by their robust score, rewinds, batches passed over, and a step made again to look at it."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.parallel.engine import OneStage
from meshwright.runs import rewinds
from meshwright.runs.folder import RunFolder
from meshwright.train.bad_steps import FEWEST, RecentLosses
from meshwright.train.gpu_meter import parse_smi
from meshwright.train.stragglers import slow_ranks

SETTINGS = [
    "data.cache=cache", "checkpoint.every_steps=4", "evaluation.every_steps=0", "batch.sequence_length=16",
    "model.layers=1", "model.width=32", "model.heads=2", "model.kv_heads=1", "model.ffn_width=32", "run.steps=24",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_job.parent)


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch):
    """`spoil(12, 5.0, times=2)`: multiply the loss of the batch that begins with a sample, so many times."""
    whole = OneStage.accumulate

    def arm(sample: int, factor: float, times: int) -> None:
        left = [times]

        def accumulate(engine: Any, data: Any, step: int) -> Any:
            loss = whole(engine, data, step)
            if int(data.batch.sample_ids_B[0]) == sample and left[0]:
                left[0] -= 1
                return loss * factor
            return loss

        monkeypatch.setattr(OneStage, "accumulate", accumulate)

    return arm


def train(folder: str, *overrides: str) -> list[dict[str, Any]]:
    run_job(load_job("job.toml", [*SETTINGS, *overrides, f"run.folder={folder}"]), Console(quiet=True))
    return RunFolder.open(Path(folder)).events()


def rows(folder: str) -> list[tuple[str, ...]]:
    found = RunFolder.open(Path(folder)).metrics()
    return [tuple(repr(row[name]) for name in ("step", "loss", "grad_norm", "lr", "tokens")) for row in found]


def kinds(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


def test_a_loss_is_judged_by_the_last_ones() -> None:
    losses = RecentLosses(2.0 + 0.01 * (number % 5) for number in range(FEWEST - 1))
    assert losses.score(50.0) is None, "too few to judge by"
    losses.add(2.02)
    assert abs(losses.score(2.02) or 0.0) < 1.0
    assert 50 < (losses.score(3.0) or 0.0) < 100 and (losses.score(1.0) or 0.0) < -50
    losses.add(float("nan"))
    assert len(losses.values()) == FEWEST
    assert (RecentLosses([2.0] * 40).score(2.0001) or 0.0) < 1.0, "a flat line is no reason to see spikes"


@pytest.mark.thorough
def test_a_spike_that_comes_once_is_rewound_and_nothing_is_lost(spoil) -> None:
    settings = ("run.on_bad_step=rewind", "run.spike_score=8")
    assert kinds(train("quiet", *settings), "bad_step") == []
    spoil(4 * 20, 50.0, times=1)  # the batch of step 21
    events = train("run", *settings)
    [bad], [back] = kinds(events, "bad_step"), kinds(events, "rewind")
    assert bad["step"] == 21 and bad["score"] > 8 and bad["position"] == 80 and bad["samples"] == 4
    assert back == {**back, "step": 21, "to": 20, "pass_over": []}
    assert rows("run") == rows("quiet")


def test_a_batch_that_is_bad_twice_is_passed_over(spoil) -> None:
    spoil(4 * 9, float("nan"), times=99)
    events = train("run", "run.on_bad_step=rewind", "run.steps=12")
    assert [event["pass_over"] for event in kinds(events, "rewind")] == [[], [36]]
    assert [event["position"] for event in kinds(events, "passed_over")] == [36]
    assert [row[0] for row in rows("run")] == [str(step) for step in range(1, 13)]
    assert "nan" not in str(rows("run"))


@pytest.mark.thorough
def test_without_a_checkpoint_it_rewinds_to_the_start_and_not_for_ever(spoil, monkeypatch) -> None:
    train("quiet", "run.steps=3")
    spoil(8, float("inf"), times=1)
    assert kinds(train("run", "run.on_bad_step=rewind", "run.steps=3"), "rewind")[0]["to"] == 0
    assert rows("run") == rows("quiet")
    whole = OneStage.accumulate
    monkeypatch.setattr(OneStage, "accumulate", lambda *given: whole(*given) * float("nan"))
    monkeypatch.setattr(rewinds, "MOST_REWINDS", 2)
    with pytest.raises(UserError, match="step 1 is still bad after 2 rewinds; look at it with `meshwright replay"):
        train("hopeless", "run.on_bad_step=rewind", "run.steps=3")


@pytest.mark.thorough
def test_a_spike_stops_or_is_skipped_as_the_job_says(spoil) -> None:
    spoil(4 * 20, 50.0, times=99)
    with pytest.raises(UserError, match=r"step 21 has loss .* robust deviations above the recent losses"):
        train("stops", "run.spike_score=8")
    events = train("skips", "run.spike_score=8", "run.on_bad_step=skip")
    assert kinds(events, "bad_step")[0]["policy"] == "skip" and kinds(events, "stop")[0]["reason"] == "finished"


def test_a_step_is_made_again_and_its_samples_shown(cli, spoil) -> None:
    spoil(4 * 5, float("nan"), times=1)
    train("run", "run.on_bad_step=skip", "run.steps=8")
    result = cli("replay", "run", "--step", "6", "--device", "cpu", "--json")
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["position"] == 20 and told["from_step"] == 4 and told["recorded_loss"] != told["recorded_loss"]
    assert 0 < told["loss"] < 20, "the fault was the machine's, not the data's"
    assert {sample["sample"] for sample in told["samples"]} == {20, 21, 22, 23}
    assert told["samples"][0]["loss"] == max(sample["loss"] for sample in told["samples"])
    assert "return" in told["samples"][0]["text"] or "def" in told["samples"][0]["text"]
    good = json.loads(cli("replay", "run", "--step", "5", "--device", "cpu", "--json").out)
    assert good["loss"] == pytest.approx(good["recorded_loss"], rel=1e-6)
    assert good["grad_norm"] == pytest.approx(good["recorded_grad_norm"], rel=1e-5)
    result = cli("replay", "run", "--step", "99")
    assert result.code == 2 and "--step 99 is not a step of run; give one from 1 to 8" in result.err
    assert "sample" in cli("replay", "run", "--step", "5", "--device", "cpu").out


def test_rewinding_stages_that_do_not_wait_for_each_other_is_refused(cli) -> None:
    words = ["layout.pp=2", "layout.schedule=pipedream", "model.tied=false", "batch.micro_batch=4"]
    sets = [word for each in [*words, "run.on_bad_step=rewind"] for word in ("--set", each)]
    result = cli("train", "job.toml", *sets, "--nproc", "2")
    assert result.code == 2 and 'run.on_bad_step = "rewind"' in result.err


def test_what_nvidia_smi_says_becomes_plain_units() -> None:
    assert parse_smi("87, 512.25, 1024, 1980\n") == {
        "gpu_utilisation": pytest.approx(0.87),
        "gpu_power_w": 512.25,
        "gpu_memory_bytes": 2.0**30,
        "gpu_clock_mhz": 1980.0,
    }
    assert parse_smi("3, [N/A], 0, [N/A]\n") == {"gpu_utilisation": pytest.approx(0.03), "gpu_memory_bytes": 0.0}


def test_the_rank_that_keeps_others_waiting_is_named() -> None:
    times = {"work_s": [0.1, 0.1, 0.19, 0.11], "data_wait_s": [0.0, 0.05, 0.0, 0.0]}
    assert slow_ranks(times) == [
        "rank 2 works 190.0 ms per step, others 100.0 ms",
        "rank 1 waits for data 50.0 ms per step, others 0.0 ms",
    ]
    assert slow_ranks({"work_s": [0.1, 0.2], "data_wait_s": [0.0, 0.0]}) == [
        "rank 1 works 200.0 ms per step, others 100.0 ms"
    ]
    assert slow_ranks({"work_s": [0.1, 0.12], "data_wait_s": [0.0, 0.001]}) == []
