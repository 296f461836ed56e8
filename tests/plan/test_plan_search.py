"""The search: what practice knows comes out of it, and what it writes is a job."""

import json
from pathlib import Path

import pytest
from plan_jobs import asked, nodes
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import UserError
from meshwright.job import Job, load_job, model_preset
from meshwright.job.devices import Segments
from meshwright.layout import require_layout, saved_by_name
from meshwright.plan import batch_sequences, parse_cluster, predict, search
from meshwright.plan.explain import layout_words
from meshwright.plan.space import degrees_of, hybrid_sizes, pipes_of


def test_a_small_model_is_replicated() -> None:
    """Data parallelism alone where everything fits."""
    best = search(asked("llama-3.2-1b", 4096, 128), nodes(1)).best[0].job
    assert (best.layout.tp, best.layout.pp, best.layout.cp, best.memory.recompute) == (1, 1, 1, "none")


@pytest.mark.thorough
def test_a_search_keeps_asynchronous_tensor_parallelism_where_it_runs_and_never_begins_it() -> None:
    with_it = search(asked("llama-3-70b", 8192, 64, layout={"async_tp": True}), nodes(2)).best
    assert any(one.job.layout.tp > 1 for one in with_it)
    for one in with_it:
        assert one.job.layout.async_tp == (one.job.layout.tp > 1)
        require_layout(one.job, 16)
    without = search(asked("llama-3-70b", 8192, 64), nodes(2)).best
    assert any(one.job.layout.tp > 1 for one in without) and not any(one.job.layout.async_tp for one in without)


@pytest.mark.thorough
def test_175b_on_1024_lands_near_what_was_run() -> None:
    """Data × tensor × pipeline of 16 × 8 × 8 is among the first, and all have tp in a node."""
    found = search(asked("gpt3-175b", 2048, 1536), nodes(128, "a100-80gb"))
    degrees = [(one.job.data_parallel, one.job.layout.tp, one.job.layout.pp) for one in found.best]
    assert (16, 8, 8) in degrees
    assert all(tp <= 8 for _, tp, _ in degrees)
    assert found.bounded > 1000


def test_segments_are_found_where_full_recomputation_does_not_fit() -> None:
    """A 70B model on 24 GPUs of 64 GB: a larger micro-batch fits if every second block's input is kept."""
    cluster = nodes(3, "a100-64gb")
    found = search(asked("llama-3-70b", 8192, 256), cluster)
    [one, *_] = [one for one in found.best if isinstance(one.job.memory.recompute, Segments)]
    full = one.job.model_copy(update={"memory": one.job.memory.model_copy(update={"recompute": "full"})})
    room = 0.95 * one.prediction.capacity_bytes
    assert one.prediction.fullest.device <= room < predict(full, cluster).fullest.device
    assert f"recompute {one.job.memory.recompute}" in layout_words(one.job)
    assert load_job("demo", [f"memory.recompute={one.job.memory.recompute}"]).job.memory == one.job.memory


def test_the_best_are_those_predicted_fastest_and_run() -> None:
    found = search(asked("llama-2-7b", 2048, 32), parse_cluster("4xa100-80gb"))
    steps = [one.prediction.step_s for one in found.best]
    assert steps == sorted(steps)
    for one in found.best:
        require_layout(one.job, 4)
        assert one.prediction.fullest.device <= 0.95 * one.prediction.capacity_bytes
    for miss in found.misses:
        assert miss.prediction.step_s < steps[0]


def test_a_width_that_ranks_do_not_divide_is_no_hindrance() -> None:
    """Tensor parallelism is tried as for any other width."""
    odd = asked("qwen3-0.6b", 4096, 8, model={"width": 1023})
    assert {tp for tp, _, _ in degrees_of(odd, 8)} == {1, 2, 4, 8}


def test_copied_keys_are_counted() -> None:
    """Ulysses on more ranks than there are key-value heads: attention keeps a copy for each."""
    shapes = {"model": model_preset("llama-3-8b"), "batch": {"global_batch": 1, "micro_batch": 1}}
    layouts = {cp: {"cp": cp, "cp_method": "ulysses"} for cp in (8, 32)}
    jobs = {cp: Job.model_validate({**shapes, "layout": layout}) for cp, layout in layouts.items()}
    kept = {cp: saved_by_name(job, "none", first=True, last=True) for cp, job in jobs.items()}
    keys, queries = ("layers.0.", "attention.k"), ("layers.0.", "attention.q")
    assert kept[8][keys] * 4 == kept[8][queries] and kept[32][keys] == kept[32][queries]


def test_the_written_job_loads_and_checks(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    arguments = ["plan", "--model", "llama-3.2-1b", "--cluster", "2xh100", "--seq", "2048", "--batch-tokens", "131072"]
    found = json.loads(CliRunner().invoke(app, [*arguments, "--write", str(path), "--json"]).stdout)
    job = load_job(str(path)).job
    require_layout(job, 2)
    assert job.layout.model_dump(mode="json") == found["layouts"][0]["layout"]
    assert job.tokens_per_step == 131072
    assert predict(job, parse_cluster("2xh100")).step_s == pytest.approx(found["layouts"][0]["step_s"])
    shown = CliRunner().invoke(app, [*arguments, "--top", "2"]).stdout
    assert "layouts bounded" in shown and "limited by" in shown


def test_an_odd_sequence_is_planned_without_cutting_it() -> None:
    found = search(asked("gpt2", 1023, 512), parse_cluster("8xh100"))
    assert found.best and {one.job.layout.tp * one.job.layout.cp for one in found.best} == {1}


@pytest.mark.thorough
@pytest.mark.parametrize("cluster", ["3x8xh100", "6xh100", "5x4xh100", "96x8xh100"])
def test_the_usual_batch_is_one_that_the_machines_share(cluster: str) -> None:
    """Nobody asked for it, so it must not be what stands in the way; where they are a power of two, nor is it moved."""
    machines = parse_cluster(cluster)
    model = load_job("pretrain-1b").job.model
    batch, practice = batch_sequences(model, 4096, machines.nodes * machines.gpus_per_node, None)
    assert practice and 128 <= batch <= 512 and search(asked("llama-3.2-1b", 4096, batch), machines, top=1).best
    assert batch_sequences(model, 4096, 16, None)[0] == 256


def test_refusals_say_what_to_do() -> None:
    for arguments, word in (
        (["--model", "llama-3-70b", "--cluster", "1xh100"], "no layout of llama-3-70b fits"),
        (["--model", "llama-3.2-1b"], "--cluster is missing"),
        (["--model", "llama-3.2-1b", "--cluster", "8xh100", "--seq", "1000000"], "--seq = 1000000 is longer"),
        (["--model", "no.json", "--cluster", "8xh100"], "no.json does not exist; give --model"),
    ):
        error = CliRunner().invoke(app, ["plan", *arguments]).exception
        assert isinstance(error, UserError) and word in str(error), arguments


def test_a_search_of_huge_jobs_is_bounded() -> None:
    """No pipeline has more than 128 stages, and numbers of GPUs with many divisors have few sizes of hybrid groups."""
    deep = asked("llama-2-7b", 2048, 512)
    deep = deep.model_copy(update={"model": deep.model.model_copy(update={"layers": 10_000})})
    assert max(len(pipe.counts) for pipe in pipes_of(deep, 512, frozenset())) == 128
    assert hybrid_sizes(16384, 8) == {2**power for power in range(15)}
    assert hybrid_sizes(24, 8) == {1, 2, 3, 4, 6, 8, 12, 24}
    assert hybrid_sizes(1440, 72) == {1, 2, 4, 8, 16, 32, 72, 144, 288}


def test_100800_gpus_have_as_many_layouts_as_other_numbers() -> None:
    """Of 126 divisors: with every one as a hybrid group, there are nine times as many."""
    found = search(asked("llama-2-7b", 2048, 100_800), nodes(12_600), enough=lambda: True)
    assert found.bounded < 100_000
