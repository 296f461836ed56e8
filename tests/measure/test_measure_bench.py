"""`meshwright bench`: a job measured, its phases and kernels, and lists of settings that survive refusals and kills."""

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.cost import flops_per_token
from meshwright.errors import UserError
from meshwright.job import Job, load_job
from meshwright.measure import settings_of
from meshwright.measure.bench import executed_flops_per_token, spread_of
from meshwright.measure.kernels import kind_of
from meshwright.parallel import cuda_graph

SHORT = ("--steps", "3", "--warmup", "1")


def test_a_job_is_timed_and_looked_into_and_nothing_is_saved(cli: Any, tiny_job: Path) -> None:
    done = cli("bench", "job.toml", *SHORT, "--profile", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert set(result) >= {
        "device", "devices", "torch", "parameters", "tokens_per_step", "first_step_s", "step_s", "tokens_per_s",
        "tokens_per_s_per_device", "mfu", "mfu_causal", "hfu", "peak_memory_bytes", "steady_memory_bytes",
        "reserved_memory_bytes", "data_wait_share", "losses", "phases_s", "kernels",
    }  # fmt: skip
    spread = result["step_s"]
    assert 0 < spread["least"] <= spread["low"] <= spread["median"] <= spread["high"] <= spread["most"]
    assert result["tokens_per_s"] == pytest.approx(result["tokens_per_step"] / spread["median"])
    assert 3 * spread["least"] <= result["timed_s"] < 6 * spread["most"]
    assert len(result["losses"]) == 3 and result["mfu"] is None  # nobody knows a CPU's peak
    assert set(result["phases_s"]) == {"data", "forward", "loss", "backward", "reduce", "optimizer", "other"}
    assert min(result["phases_s"].values()) >= 0
    kinds = result["kernels"]["kinds_s"]
    assert kinds["products"] > 0 and kinds["attention"] > 0 and kinds["communication"] == 0
    assert not (tiny_job.parent / "run").exists()


def test_timed_steps_train_as_they_would_without(cli: Any, tiny_job: Path) -> None:
    timed = json.loads(cli("bench", "job.toml", *SHORT, "--json").out)["losses"]
    # as many steps in all: the rate's schedule follows run.steps
    assert cli("train", "job.toml", "--set", "run.steps=6", "--set", "evaluation.every_steps=0").code == 0
    rows = [json.loads(line) for line in (tiny_job.parent / "run/metrics.jsonl").read_text().splitlines()]
    assert timed == [row["loss"] for row in rows if "loss" in row][1:4]


def test_no_step_is_timed_that_captures_a_graph(cli: Any, tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "why_no_graph", lambda job, world: None)  # on a CPU nothing is captured
    result = json.loads(cli("bench", "job.toml", *SHORT, "--set", "run.cuda_graph=true", "--json").out)
    assert (result["warmup"], result["steps"]) == (cuda_graph.STEPS_BEFORE + 1, 3)
    assert json.loads(cli("bench", "job.toml", *SHORT, "--json").out)["warmup"] == 1


def test_the_table_says_how(cli: Any, tiny_job: Path) -> None:
    done = cli("bench", "job.toml", *SHORT)
    assert done.code == 0, done.err
    for part in ("median of 3 after 1", "tokens/s", "data wait", "backward"):
        assert part in " ".join(done.out.split()), part


@pytest.mark.thorough
def test_two_ranks_are_measured_and_traced_together(tiny_job: Path, warm_command: Path) -> None:
    words = ["bench", "job.toml", *SHORT, "--nproc", "2", "--set", "layout.dp_shard=2", "--trace", "--json"]
    command = [str(warm_command / "meshwright"), *words]
    done = subprocess.run(command, cwd=tiny_job.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["devices"] == 2 and result["tokens_per_s_per_device"] == result["tokens_per_s"] / 2
    # One step of warm-up, three timed and two for the phases come before.
    names = [f"bench-job-traces/attempt-0-steps-7-8-rank-{rank}.json.gz" for rank in (0, 1)]
    assert result["traces"] == names
    for name in names:
        content = json.loads(gzip.decompress((tiny_job.parent / name).read_bytes()))
        steps = [event["name"] for event in content["traceEvents"] if event.get("name", "").startswith("step ")]
        assert steps == ["step 7", "step 8"]


def test_another_trace_does_not_replace_the_first(cli: Any, tiny_job: Path) -> None:
    (tiny_job.parent / "bench-job-traces").mkdir()
    done = cli("bench", "job.toml", "--steps", "1", "--warmup", "1", "--trace")
    assert done.code == 0, done.err
    assert "bench-job-traces-2, for ui.perfetto.dev" in " ".join(done.out.split())
    assert [path.name for path in tiny_job.parent.glob("*/*.gz")] == ["attempt-0-steps-5-6-rank-0.json.gz"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["--nvtx"], "--nvtx marks the steps of --trace for nsys; add --trace"), (["--trace", "--nvtx"], "an NVIDIA GPU")],
)
def test_marks_for_nsys_need_a_gpu(cli: Any, tiny_job: Path, words: list[str], sentence: str) -> None:
    done = cli("bench", "job.toml", *SHORT, *words)
    assert done.code == 2 and sentence in done.err


@pytest.mark.thorough
@pytest.mark.usefixtures("warm_python")
def test_a_sweep_goes_on_where_it_was_and_survives_what_cannot_run(cli: Any, tiny_job: Path) -> None:
    file = tiny_job.parent / "rows.jsonl"
    sweep = ("bench", "job.toml", *SHORT, "--sweep", "batch.micro_batch=1,3", "--out", str(file), "--json")
    done = cli(*sweep)
    assert done.code == 0, done.err
    first, second = json.loads(done.out)["rows"]
    assert first["state"] == "measured" and first["result"]["tokens_per_s"] > 0
    assert second["state"] == "refused" and "set batch.micro_batch to one of 1, 2, 4" in second["why"]

    whole = file.read_text()
    file.write_text(whole.splitlines()[0] + "\n" + whole.splitlines()[1][:20])  # killed while it wrote
    again = cli(*sweep)
    assert json.loads(again.out)["rows"][0] == first and "1 of 2 settings are in" in again.err
    assert len(json.loads(again.out)["rows"]) == 2


def test_settings_are_all_combinations() -> None:
    assert settings_of(["a.b=1,2", 'c.d={every=2},"x,y"']) == [
        ("a.b=1", "c.d={every=2}"), ("a.b=1", 'c.d="x,y"'), ("a.b=2", "c.d={every=2}"), ("a.b=2", 'c.d="x,y"'),
    ]  # fmt: skip
    with pytest.raises(UserError, match=r'--sweep "a.b" is not of the form field=value,value'):
        settings_of(["a.b"])


def test_what_cannot_be_measured_is_one_sentence(cli: Any, tiny_job: Path) -> None:
    done = cli("bench", "job.toml", "--out", "rows.jsonl")
    assert done.code == 2 and "give --sweep too" in done.err
    done = cli("bench", "job.toml", "--set", "layout.dp_shard=2")
    assert done.code == 2 and "layout" in done.err


def test_executed_flops_count_what_recomputation_repeats() -> None:
    def executed(recompute: str) -> float:
        job = load_job("demo", [f'memory.recompute="{recompute}"']).job
        return executed_flops_per_token(job)

    job: Job = load_job("demo", []).job
    scores_again = 2 * job.model.layers * 128 * job.model.heads * job.model.head_dim  # by flash attention's backward
    assert executed("none") == flops_per_token(job.model, 128, "full") + scores_again
    assert executed("none") == executed("selective") < executed("full") < 4 / 3 * executed("none")


def test_spreads_and_kinds() -> None:
    spread = spread_of([float(n) for n in range(11)])
    assert (spread.median, spread.low, spread.high, spread.least, spread.most) == (5.0, 1.0, 9.0, 0.0, 10.0)
    names = {
        "nvjet_hsh_256x128": "products",
        "ncclDevKernel_AllGather_RING": "communication",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "attention",
        "Memcpy DtoD": "copies",
        "triton_poi_fused_add_mul_3": "other",
        "void at::native::multi_tensor_apply_kernel<FusedAdam>": "optimizer",
    }
    assert {name: kind_of(name) for name in names} == names


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_the_devices(cli: Any, tiny_job: Path) -> None:
    settings = ("--set", "run.device=cuda", "--set", "precision.compute=bf16")
    result = json.loads(cli("bench", "job.toml", *SHORT, *settings, "--profile", "--json").out)
    assert result["reserved_memory_bytes"] >= result["peak_memory_bytes"] > 0
    assert result["kernels"]["kinds_s"]["products"] > 0
    assert torch.cuda.get_device_name() == result["device"]
