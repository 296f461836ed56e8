"""Other numbers of GPUs, whole trainings, and what failures leave of them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from plan_jobs import asked, llama, nodes
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.plan import economy, predict, scale, scale_lines, search
from meshwright.plan.economy import goodput_of

BATCH = {"sequence_length": 4096, "global_batch": 64, "micro_batch": 1}


def test_tensor_parallelism_falls_past_the_node() -> None:
    job = llama("llama-3-70b", batch=BATCH, layout={"kv_replicate": True})
    points = scale(job, nodes(8), [2, 4, 8, 16], "strong", "tp")
    shares = [point.efficiency for point in points if point.efficiency]
    assert len(shares) == 4 and shares == sorted(shares, reverse=True)
    assert shares[2] / shares[1] > 0.8 and shares[3] / shares[2] < 0.67
    drawn = scale_lines(points, "tp")
    assert drawn[3].count("█") > 1.4 * drawn[4].count("█")
    memory = [point.prediction.fullest.device for point in points if point.prediction]
    assert memory == sorted(memory, reverse=True)


def test_weak_scaling_loses_less_than_strong() -> None:
    job = llama("llama-3.2-1b", batch={**BATCH, "global_batch": 128, "micro_batch": 2}, layout={"dp_shard": 8})
    weak, strong = (scale(job, nodes(1), [8, 64], kind, None)[-1].efficiency for kind in ("weak", "strong"))
    assert weak and strong and weak > strong
    refused = scale(job, nodes(1), [8, 12], "strong", None)[-1]
    assert refused.prediction is None and "batch" in refused.why


def test_a_whole_training() -> None:
    job = llama(batch=BATCH, layout={"dp_shard": 8})
    cluster = nodes(1)
    prediction = predict(job, cluster)
    told = economy(job, prediction, cluster, 1e12, price=2.0)
    hours = 1e12 / prediction.tokens_per_s_per_gpu / 3600
    assert told.gpu_hours == pytest.approx(hours) and told.cost == pytest.approx(2 * hours)
    assert told.days == pytest.approx(hours / 8 / 24) and told.goodput is None
    often = economy(job, prediction, cluster.model_copy(update={"mtbf_hours": 3.0}), 1e12)
    assert often.goodput and 0.5 < often.goodput < 0.99 and often.days > told.days


def test_goodput_is_largest_at_its_interval() -> None:
    best, every = goodput_of(10.0, 36_000.0)
    assert every == pytest.approx((2 * 10 * 36_000) ** 0.5)

    def at(interval: float) -> float:
        return 1 / (1 + 10.0 / interval + (interval / 2 + 300) / 36_000)

    assert best == pytest.approx(at(every)) and best > at(every / 2) and best > at(2 * every)


def test_accumulation_follows_from_batch_and_ranks() -> None:
    """1,024 sequences, 2 a micro-batch on 128 data-parallel ranks: 4 micro-batches each."""
    job = llama(batch={"sequence_length": 2048, "global_batch": 1024, "micro_batch": 2}, layout={"dp_shard": 128})
    assert job.accumulation == 4


def test_what_is_allowed_may_win() -> None:
    job = asked("llama-2-7b", 4096, 64)
    plain = search(job, nodes(1), top=1)
    eight = search(job, nodes(1), top=1, allow=("fp8",))
    assert eight.best[0].job.precision.compute == "fp8"
    assert eight.best[0].prediction.step_s < plain.best[0].prediction.step_s
    small = nodes(1, "rtx-3090").model_copy(update={"gpus_per_node": 1, "host_memory_gib": 256.0})
    fewer = asked("llama-2-7b", 2048, 8)
    assert not search(fewer, small, top=1).best
    assert search(fewer, small, top=1, allow=("offload",)).best[0].job.memory.offload == ("optimizer",)
    with pytest.raises(UserError, match="--allow has 'fp4'"):
        search(job, nodes(1), allow=("fp4",))


def test_the_command_shows_all_of_it() -> None:
    words = ["plan", "--model", "llama-3.2-1b", "--cluster", "2xh100", "--seq", "2048", "--batch-tokens", "131072"]
    words += ["--tokens", "1e12", "--price", "3", "--mtbf-hours", "100", "--top", "1"]
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    training = found["layouts"][0]["training"]
    assert training["cost"] == pytest.approx(3 * training["gpu_hours"]) and 0.9 < training["goodput"] < 1
    assert found["bounded"] / found["bound_s"] > 5000
    shown = CliRunner().invoke(app, words).stdout
    assert "GPU-hours" in shown and "goodput" in shown
    scaled = ["plan", "--check", "pretrain-1b", "--cluster", "8xh100", "--scale", "1,2,4", "--axis", "tp"]
    points = json.loads(CliRunner().invoke(app, [*scaled, "--json"]).stdout)["points"]
    assert [point["gpus"] for point in points] == [1, 2, 4] and points[0]["efficiency"] == 1.0
    error = CliRunner().invoke(app, ["plan", "--model", "llama-3-70b", "--cluster", "1xh100"]).exception
    assert "times the GPUs" in str(error)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tokens", "0"], "--tokens = 0 must be greater than 0; correct it or leave it out"),
        (["--tokens", "1e9", "--price", "-3"], "--price = -3 must be greater than 0; correct it or leave it out"),
        (["--mtbf-hours", "nan"], "--mtbf-hours = nan must be greater than 0; correct it or leave it out"),
        (["--price", "3"], "--price = 3 prices the whole training; give its length with --tokens"),
    ],
)
def test_a_cost_that_cannot_be_is_refused(cli: Callable[..., Any], words: list[str], sentence: str) -> None:
    result = cli("plan", "--model", "gpt2", "--cluster", "1xh100", *words)
    assert result.code == 2 and sentence in " ".join(result.err.split())


def test_a_70b_on_64_gpus_fits_as_the_recipe_has_it_and_not_with_64_sequences_at_once() -> None:
    own = predict(load_job("pretrain-70b-64xh100").job, nodes(8))
    assert own.fits and own.mfu is not None and own.mfu > 0.3
    advised = ["batch.micro_batch=64", "layout.sp=false", 'memory.recompute="full"']
    rejected = predict(load_job("pretrain-70b-64xh100", advised).job, nodes(8))
    boundaries = 64 * 4096 * 8192 * 2 * 80  # every block's input, whole on each rank of the node
    assert not rejected.fits and rejected.memory[0].terms["activations"] >= boundaries > 80e9
