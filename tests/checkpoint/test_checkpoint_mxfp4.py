"""gpt-oss as it is published: experts in MXFP4 are read as transformers unpacks them, any rows at a time."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint import HfWeights, load_hf_weights
from meshwright.errors import UserError
from meshwright.job import Model, model_of_folder, model_to_hf_config
from meshwright.model import Decoder, initialise, to_hf_state

SHAPE = Model.model_validate(
    {
        "vocab_size": 50, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "max_sequence_length": 16,
        "qkv_bias": True, "linear_bias": True, "sinks": True, "sliding_window": 4, "window_layers": "alternate",
        "experts": {"count": 3, "top_k": 2, "ffn_width": 64, "swiglu_limit": 7.0},
    }
)  # fmt: skip
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    decoder = Decoder(SHAPE)
    initialise(decoder, 0)
    state = to_hf_state(decoder)
    draw = torch.Generator().manual_seed(0)
    for name, groups in (("gate_up_proj", 1), ("down_proj", 2)):
        experts, _, outputs = state.pop(f"{EXPERTS}.{name}").shape
        size = (experts, outputs, groups)
        state[f"{EXPERTS}.{name}_blocks"] = torch.randint(0, 256, (*size, 16), generator=draw, dtype=torch.uint8)
        state[f"{EXPERTS}.{name}_scales"] = torch.randint(118, 126, size, generator=draw, dtype=torch.uint8)
    save_file(state, tmp_path / "model.safetensors")
    config = model_to_hf_config(SHAPE) | {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_experts_are_unpacked_as_transformers_does(folder: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    assert model_of_folder(folder) == SHAPE.model_copy(update={"ffn_width": 64})
    stored = load_file(folder / "model.safetensors")
    decoder = Decoder(SHAPE)
    load_hf_weights(folder, decoder)
    state = to_hf_state(decoder)
    for name in ("gate_up_proj", "down_proj"):
        parts = (stored[f"{EXPERTS}.{name}_{part}"] for part in ("blocks", "scales"))
        theirs = mxfp4.convert_moe_packed_tensors(*parts, dtype=torch.float32)
        assert theirs.abs().max() > 0 and torch.equal(state[f"{EXPERTS}.{name}"], theirs)


def test_any_rows_are_read(folder: Path) -> None:
    source = HfWeights(folder, SHAPE)
    source.require()
    size = (3 * 128, 32)
    whole = source.rows("layers.0.moe.experts.gate_up.weight", size, slice(None))
    for rows in (slice(0, 1), slice(100, 300), slice(383, 384)):
        assert torch.equal(source.rows("layers.0.moe.experts.gate_up.weight", size, rows), whole[rows])


def test_half_of_a_pair_is_refused(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in state.items() if not n.endswith("up_proj_scales")}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"gate_up_proj_blocks has no .*gate_up_proj_scales"):
        HfWeights(folder, SHAPE)
