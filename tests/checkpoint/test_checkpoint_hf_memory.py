"""Weights pass through in blocks: neither import, export nor a sharded start ever holds the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshwright.checkpoint.hf_read import parameter_sizes
from meshwright.cost import parameter_count
from meshwright.job import Model, model_to_hf_config
from meshwright.model import hf_tensors

SHAPE = Model(vocab_size=8192, width=1024, layers=8, heads=8, kv_heads=4, ffn_width=2560, max_sequence_length=512)
"""Its largest tensor is a thirteenth of it: what allocators and libraries add (20 to 60 MB) is small beside it too."""


@pytest.mark.thorough
def test_import_export_and_a_sharded_start_hold_a_few_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_to_hf_config(SHAPE)))
    # One file, so that a reader that keeps mapped what it has read would hold all of it.
    tensors = hf_tensors(SHAPE, parameter_sizes(SHAPE))
    state = {tensor.name: torch.ones(tensor.size, dtype=torch.bfloat16) for tensor in tensors}
    save_file(state, folder / "model.safetensors", {"format": "pt"})

    script = Path(__file__).with_name("hf_memory.py")
    done = subprocess.run([sys.executable, script, folder, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    grown, model_bytes = json.loads(done.stdout), 4 * parameter_count(SHAPE)
    assert grown["whole"] >= model_bytes  # what the measure says of a process that does hold it
    assert grown["import"] < model_bytes / 3 and grown["export"] < model_bytes / 3
    assert all(model_bytes / 4 <= rank < 0.4 * model_bytes for rank in grown["ranks"])
