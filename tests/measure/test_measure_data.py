"""`meshwright bench --data`: a loader measured alone, by stage, and against the step that it feeds."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from meshwright.measure import loading
from meshwright.measure.loading import wait_share

SHORT = ("--data", "--steps", "2", "--warmup", "1")
SLOW_S = 0.004
ENCODER = f"""
import time
import numpy as np

class Encoder:
    def items(self, field, raw, random):
        time.sleep({SLOW_S})
        return np.zeros((1, 3, 16, 16), np.float32)
"""
MEDIA_JOB = """
[model]
preset = "tiny-llama"

[data]
sources = ["pictures.tar"]
encoder = "slow.py:Encoder"
validation_fraction = 0.0
packing = "none"
items_per_sequence = 1
workers = {workers}

[data.fields.image]
kind = "image"
size = 16
tokens = 4

[batch]
sequence_length = 32
global_batch = 4
micro_batch = 2
"""


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LEAST_S", 0.01)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A tar of forty pictures, and an encoder that takes its time."""
    from PIL import Image

    with tarfile.open(tmp_path / "pictures.tar", "w") as archive:
        for number in range(40):
            stream = io.BytesIO()
            Image.new("RGB", (24, 24), (number, 0, 0)).save(stream, "PNG")
            for ending, raw in (("png", stream.getvalue()), ("txt", f"picture {number}".encode())):
                member = tarfile.TarInfo(f"{number:03}.{ending}")
                member.size = len(raw)
                archive.addfile(member, io.BytesIO(raw))
    (tmp_path / "slow.py").write_text(ENCODER)
    return tmp_path


def test_a_text_job_is_measured_alone_and_in_training(cli: Any, tiny_job: Path) -> None:
    done = cli("bench", "job.toml", *SHORT, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["samples_per_s"] == pytest.approx(found["steps"] * found["samples_per_step"] / found["timed_s"])
    assert found["tokens_per_s"] == pytest.approx(32 * found["samples_per_s"])  # nothing is padded
    assert found["items_per_s"] is None and found["decode"] is None
    assert set(found["stages_s"]) == {"pack", "batch"} and min(found["stages_s"].values()) > 0
    assert found["cpu_s_per_1000_samples"] > 0
    assert found["step_from"] == "measured" and 0 < found["data_wait_share"] < 1  # without workers it always waits
    assert found["needed_samples_per_s"] == pytest.approx(found["samples_per_step"] / found["step_s"])
    assert not (tiny_job.parent / "run").exists()


def test_a_stream_is_measured_by_what_it_reads_and_tokenises(cli: Any, tiny_job: Path) -> None:
    stream = ("--set", "data.stream=true", "--set", "data.shuffle_buffer=2", "--step-time", "1")
    done = cli("bench", "job.toml", *SHORT, *stream, "--json")
    assert done.code == 0, done.err
    assert set(json.loads(done.out)["stages_s"]) == {"read", "encode", "pack", "batch"}


@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_that_no_model_reads_are_measured_without_a_step(cli: Any, pictures: Path, workers: int) -> None:
    (pictures / "job.toml").write_text(MEDIA_JOB.format(workers=workers))
    done = cli("bench", "job.toml", *SHORT, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["step_s"] is None and found["data_wait_share"] is None and "model.vision" in found["step_from"]
    assert found["items_per_s"] == pytest.approx(found["samples_per_s"])
    assert found["stages_s"]["decode"] >= 1000 * SLOW_S and found["stages_s"]["read"] > 0
    if workers == 0:  # workers may have read before the measurement began
        assert found["timed_s"] >= found["steps"] * 4 * SLOW_S
    told = cli("bench", "job.toml", *SHORT).out
    assert "unknown without a step" in told and "decode" in told and "CPU time" in told


def test_a_given_step_says_how_long_it_would_wait(cli: Any, pictures: Path) -> None:
    (pictures / "job.toml").write_text(MEDIA_JOB.format(workers=0))
    found = json.loads(cli("bench", "job.toml", *SHORT, "--step-time", "0.016", "--json").out)
    loading_s = found["timed_s"] / found["steps"]
    assert found["step_from"] == "given" and loading_s >= 4 * SLOW_S
    assert found["data_wait_share"] == pytest.approx(loading_s / (loading_s + 0.016))
    assert found["needed_samples_per_s"] == pytest.approx(4 / 0.016)


def test_workers_read_while_a_step_computes() -> None:
    assert wait_share(0.2, 0.2, workers=0) == 0.5
    assert wait_share(0.2, 0.2, workers=1) == 0.0
    assert wait_share(0.4, 0.1, workers=2) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--data", "--profile"), "leave out --profile and --trace"),
        (("--step-time", "1"), "give both"),
        (("--data", "--step-time", "0"), "more than 0"),
    ],
)
def test_what_does_not_go_together_is_refused(cli: Any, tiny_job: Path, words: tuple[str, ...], sentence: str) -> None:
    done = cli("bench", "job.toml", *words)
    assert done.code == 2 and sentence in done.err


@pytest.mark.thorough
@pytest.mark.usefixtures("warm_python")
def test_a_sweep_of_loaders_prints_samples(cli: Any, tiny_job: Path) -> None:
    words = ("--step-time", "0.01", "--sweep", "data.workers=0", "--out", "rows.jsonl")
    done = cli("bench", "job.toml", *SHORT, *words)
    assert done.code == 0, done.err
    assert "data.workers=0:" in done.out and "samples/s" in done.out and "data wait" in done.out
