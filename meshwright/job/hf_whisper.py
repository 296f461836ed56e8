"""Whisper's config.json as the sizes of [model.audio]."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.job.audio import FRAMES_PER_SECOND, STRIDE
from meshwright.job.hf_values import expect, needed
from meshwright.job.reading import json_table, read_settings_text

CONFIG = "config.json"
_SIZES = {
    "mels": "num_mel_bins",
    "width": "d_model",
    "layers": "encoder_layers",
    "heads": "encoder_attention_heads",
    "ffn_width": "encoder_ffn_dim",
}
"""Ours and transformers' names of what a folder determines."""


def complete_audio(table: dict[str, Any]) -> None:
    """Add what the folder of model.audio.init_from determines to the table of a job, in place."""
    model = table.get("model")
    audio = model.get("audio") if isinstance(model, dict) else None
    if isinstance(model, dict) and isinstance(audio, dict) and isinstance(audio.get("init_from"), str):
        model["audio"] = _whisper_table(audio["init_from"], audio) | audio


def _whisper_table(folder: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a folder's encoder; given fields that contradict them are rejected."""
    path, field = Path(folder) / CONFIG, f'model.audio.init_from = "{folder}"'
    if not path.is_file() and not Path(folder).exists() and given.keys() >= _SIZES.keys():
        return {}  # a run that has weights of its own by now
    if not path.is_file():
        raise UserError(f"{field} has no {CONFIG}; give the folder of a Whisper model")
    config = json_table(path, read_settings_text(path, "download it again"), "download it again")
    try:
        expect(config, "model_type", ("whisper",), None)
        expect(config, "activation_function", ("gelu",), "gelu")
        sizes: dict[str, Any] = {ours: needed(config, theirs) for ours, theirs in _SIZES.items()}
        sizes["seconds"] = needed(config, "max_source_positions") * STRIDE / FRAMES_PER_SECOND
    except UserError as error:
        raise UserError(f"{field}: {error}") from None
    for name, value in sizes.items():
        if name in given and given[name] != value:
            raise UserError(
                f"model.audio.{name} = {given[name]} contradicts {field}, whose {CONFIG} gives {value}; leave it out"
            )
    return sizes
