"""The encoder of a Whisper folder: the same hidden states as transformers', and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint import first_rows, whisper_start
from meshwright.errors import UserError
from meshwright.job import Model, load_job, model_to_hf_config
from meshwright.model import Decoder, initialise, to_hf_state

CONFIG = {
    "vocab_size": 60,
    "num_mel_bins": 10,
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 40,
    "max_source_positions": 15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny Whisper model of transformers, and its folder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**CONFIG)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # away from zero biases and unit norms
            if "embed_positions" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("whisper")
    model.save_pretrained(folder)
    return model, folder


def shape_of(folder: Path, tmp_path: Path, audio: str = "") -> Model:
    job = tmp_path / "job.toml"
    job.write_text(
        f'[model]\nwidth = 32\nlayers = 1\nheads = 2\n[model.audio]\ninit_from = "{folder}"\n{audio}\n'
        '[data]\nsources = ["builtin:synthetic"]\n'
    )
    return load_job(str(job)).job.model


def test_hidden_states_equal_transformers(whisper: tuple[Any, Path], tmp_path: Path) -> None:
    theirs, folder = whisper
    shape = shape_of(folder, tmp_path)
    assert shape.audio is not None and shape.audio.item_shape == (10, 30) and shape.audio.tokens == 15
    listening = whisper_start(shape)
    assert listening is not None
    listening.require()
    model, rows = Decoder(shape), first_rows(shape, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(rows(name, tuple(parameter.shape), slice(None)))
        features = torch.randn(3, 10, 30)
        expected = theirs.get_encoder()(features).last_hidden_state
        assert model.audio is not None
        found = model.audio.encoded(features)
    assert ((found - expected).abs().max() / expected.abs().max()).item() <= 1e-5


def test_decoder_and_encoder_start_from_folders_of_their_own(whisper: tuple[Any, Path], tmp_path: Path) -> None:
    theirs, folder = whisper
    decoder = Decoder(Model(vocab_size=50, width=32, layers=1, heads=2, ffn_width=40))
    initialise(decoder, seed=5)
    (tmp_path / "config.json").write_text(json.dumps(model_to_hf_config(decoder.shape)))
    save_file(to_hf_state(decoder), tmp_path / "model.safetensors", {"format": "pt"})
    job = tmp_path / "both.toml"
    job.write_text(
        f'[model]\ninit_from = "{tmp_path}"\n[model.audio]\ninit_from = "{folder}"\n'
        '[data]\nsources = ["builtin:synthetic"]\n'
    )
    shape = load_job(str(job)).job.model
    rows = first_rows(shape, seed=0)
    for name, parameter in Decoder(shape).named_parameters():
        found = rows(name, tuple(parameter.shape), slice(None))
        if not name.startswith("audio."):
            assert torch.equal(found, decoder.get_parameter(name)), name
    conv = rows("audio.first.weight", (24, 10, 3), slice(None))
    assert torch.equal(conv, theirs.get_encoder().conv1.weight)


def test_what_the_folder_is_not_is_refused(whisper: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = whisper
    with pytest.raises(UserError, match=r"model.audio.width = 32 contradicts .* whose config.json gives 24"):
        shape_of(folder, tmp_path, "width = 32")
    with pytest.raises(UserError, match=r"has no config.json; give the folder of a Whisper model"):
        shape_of(tmp_path, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match=r"model_type = 'llama'"):
        shape_of(other, tmp_path)


def test_positions_that_are_learned_are_refused(whisper: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = whisper
    state = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    state["model.encoder.embed_positions.weight"] += 0.1
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    listening = whisper_start(shape_of(tmp_path, tmp_path))
    assert listening is not None
    with pytest.raises(UserError, match=r"embed_positions.weight are no sinusoids"):
        listening.require()
