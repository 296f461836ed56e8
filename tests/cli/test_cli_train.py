"""`meshwright train`, `generate`, `report`: a whole run as a new user makes it."""

import json
import os
import signal
import tomllib
from pathlib import Path

import pytest
from forked_command import ForkedCommand
from waiting import wait_until


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_a_folder_that_is_complete_in_itself(cli, tiny_job: Path) -> None:
    result = cli("train", "job.toml", "--set", "run.seed=3")
    assert result.code == 0, result.err
    run = tiny_job.parent / "run"
    metrics, events = rows(run / "metrics.jsonl"), rows(run / "events.jsonl")
    assert [row["step"] for row in metrics if "loss" in row] == list(range(1, 11))
    assert [row["step"] for row in metrics if "val_loss" in row] == [0, 5, 10]
    assert [event["kind"] for event in events] == ["start", "checkpoint", "stop"]
    assert events[-1]["reason"] == "finished"
    assert tomllib.loads((run / "job.toml").read_text())["run"]["seed"] == 3
    assert (run / "job.original.toml").read_text() == tiny_job.read_text()
    assert json.loads((run / "job.resolved.json").read_text())["run"]["seed"] == 3
    assert (run / "checkpoints/step-00000010/model.safetensors").stat().st_size > 0
    assert not list(run.rglob("*.partial"))
    for name in (
        "environment.json", "code.json", "tokenizer.json", "memory.jsonl", "report.html", "samples/step-00000010.txt",
    ):  # fmt: skip
        assert (run / name).is_file(), name
    assert "step 10/10" in result.out and "validation loss" in result.out and "report" in result.out
    assert result.out.endswith("continue meshwright generate run --prompt 'class '\n")

    text = cli("generate", "run", "--prompt", "def add", "--tokens", "8", "--json")
    assert text.code == 0 and json.loads(text.out)["text"].startswith("def add")
    assert json.loads(text.out)["step"] == 10
    again = cli("generate", "run", "--prompt", "def add", "--tokens", "8", "--json")
    assert again.out == text.out
    report = cli("report", "run", "--out", "copy.html", "--json")
    assert json.loads(report.out) == {"report": "copy.html"} and Path("copy.html").stat().st_size > 1000


def test_a_finished_run_says_how_to_train_on(cli, tiny_job: Path) -> None:
    quick = ("--set", "evaluation.every_steps=0", "--set", "run.steps=2")
    assert cli("train", "job.toml", *quick).code == 0
    again = cli("train", "run", "--resume")
    assert again.code == 0
    assert "all run.steps = 2 are done; to train on, resume with --set run.steps=4\n" in again.out
    assert "finished at step 4" in cli("train", "run", "--resume", "--set", "run.steps=4").out


def test_the_advice_after_a_run_of_one_s_own_model_works_as_printed(cli, tiny_job: Path) -> None:
    example = Path(__file__).parents[2] / "docs/examples/parallel_block.py"
    shape = ["model.width=32", "model.heads=4", "model.kv_heads=2", "model.layers=1", "model.vocab_size=300"]
    words = [f"model.file={example}", *shape, "model.max_sequence_length=64", "run.steps=2", "evaluation.every_steps=2"]
    tiny_job.write_text(tiny_job.read_text().replace('preset = "tiny-llama"', ""))
    result = cli("train", "job.toml", *(word for each in words for word in ("--set", each)))
    assert result.code == 0, result.err
    advice = result.out.splitlines()[-1].removeprefix("continue meshwright ")
    assert advice == "eval run --trust"
    followed = cli(*advice.split())
    assert followed.code == 0 and "held-out" in followed.out, followed


def test_json_output_holds_its_keys(cli, tiny_job: Path) -> None:
    result = cli("train", "job.toml", "--json", "--set", "run.steps=2")
    assert result.code == 0, result.err
    assert set(json.loads(result.out)) == {
        "folder", "report", "reason", "step", "loss", "first_val_loss", "val_loss", "tokens", "tokens_per_s", "mfu",
        "peak_memory_bytes", "steady_memory_bytes", "sample", "uncompiled", "backup_missing",
    }  # fmt: skip


@pytest.mark.thorough
def test_a_run_trained_again_from_its_job_file_gives_byte_identical_losses(cli, tiny_job: Path) -> None:
    assert cli("train", "job.toml", "--set", "run.seed=3", "--set", "run.folder=one").code == 0
    again = cli("train", "one/job.toml", "--set", "run.folder=two")
    assert again.code == 0, again.err
    losses = [
        [
            (row.get("step"), row.get("loss"), row.get("val_loss"))
            for row in rows(tiny_job.parent / folder / "metrics.jsonl")
        ]
        for folder in ("one", "two")
    ]
    assert losses[0] == losses[1]


def test_generate_refuses_what_is_not_a_finished_run(cli, tiny_job: Path) -> None:
    result = cli("generate", "nowhere")
    assert result.code == 2 and "nowhere" in result.err and "Traceback" not in result.err


def test_synthetic_tokens_need_no_files(cli, tiny_job: Path) -> None:
    result = cli("train", "job.toml", "--set", 'data.sources=["builtin:synthetic"]', "--set", "run.steps=2")
    assert result.code == 0, result.err
    refused = cli("generate", "run")
    assert refused.code == 2 and "synthetic" in refused.err


def test_ctrl_c_stops_after_the_step_with_everything_written(tiny_job: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "run/metrics.jsonl"
    settings = [
        "run.steps=100000",
        'data.sources=["builtin:synthetic"]',
        "data.workers=1",
        "evaluation.every_steps=100000",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    process = ForkedCommand(tmp_path, "train", "job.toml", *words)

    def has_trained() -> bool:
        assert process.poll() is None
        return metrics.is_file() and metrics.read_text().count('"loss"') > 3

    wait_until(has_trained, "four steps")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
    code, out, err = process.finish()
    assert code == 130, err
    assert "Traceback" not in err
    assert out.endswith("continue meshwright train run --resume\n")
    events = rows(tmp_path / "run/events.jsonl")
    assert events[-1]["reason"] == "interrupted" and events[-1]["signal"] == "SIGINT"
    last = [row["step"] for row in rows(metrics) if "loss" in row][-1]
    assert (tmp_path / f"run/checkpoints/step-{last:08d}/model.safetensors").is_file()
    assert (tmp_path / "run/report.html").is_file()


@pytest.mark.gpu
def test_a_gpu_run(cli, tiny_job: Path) -> None:
    result = cli("train", "job.toml", "--set", "run.device=cuda", "--set", "precision.compute=bf16", "--json")
    assert result.code == 0, result.err
