"""A GPU whose memory runs out is told with what was held and what was predicted; in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import torch
from rich.console import Console
from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.train import OutOfMemory
torch.cuda.set_per_process_memory_fraction(0.02)
words = ["run.device=cuda", "run.folder=run", "model.width=1024", "model.heads=8", "model.kv_heads=8",
         "model.layers=16",
         "model.ffn_width=8192", "batch.global_batch=64", "batch.micro_batch=64", "data.cache=cache"]
try:
    run_job(load_job("job.toml", words), Console(quiet=True))
except OutOfMemory as error:
    print(error)
"""


@pytest.mark.gpu
def test_a_gpu_that_is_too_small_is_told_in_bytes(tiny_job: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tiny_job.parent, env=environment, capture_output=True, text=True, timeout=300
    )
    sentence = r"ran out of memory \(([\d,]+) bytes at peak and ([\d,]+) predicted, of ([\d,]+)\)"
    found = re.search(sentence, done.stdout)
    assert found, done.stdout + done.stderr
    held, predicted, total = (int(number.replace(",", "")) for number in found.groups())
    assert 0 < held < total and predicted > 0
