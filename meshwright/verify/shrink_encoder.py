"""Shrinks an encoder of pictures or sound, keeping what decides how a layout shards it."""

from typing import Any

from meshwright.job.audio import Audio
from meshwright.job.encoder import Encoder
from meshwright.job.vision import Vision

IMAGE_SIZE, PATCH = 8, 4
MELS, SECONDS = 5, 0.07
"""Seven frames: the last token is of one frame alone."""
MOST_SLOTS = 2
"""Four tokens each: both fit into a small sequence."""
MOST_LAYERS = 2
HEAD = 4
"""Channels of a head."""


def small_encoder(encoder: Encoder, tp_before: int, tp: int) -> dict[str, Any]:
    """The encoder at CPU size: the same kind and parts that are trained, blocks that are not used if it has any, one or
    two heads per tensor-parallel rank as before."""
    heads = tp * min(2, max(1, encoder.heads // tp_before))
    return encoder.model_dump() | {
        "width": heads * HEAD,
        "heads": heads,
        "ffn_width": 10 * tp,
        "layers": min(encoder.used_layers, MOST_LAYERS),
        encoder.slots_field: min(encoder.slots, MOST_SLOTS),
        encoder.token_field: None if encoder.placeholder is None else 0,
        **_own(encoder),
    }


def _own(encoder: Encoder) -> dict[str, Any]:
    if isinstance(encoder, Audio):
        return {"mels": MELS, "seconds": SECONDS, "init_from": None}
    assert isinstance(encoder, Vision)
    select = max(encoder.select_layer, -2)
    layers = min(encoder.used_layers, MOST_LAYERS) - select - 1
    return {"image_size": IMAGE_SIZE, "patch": PATCH, "layers": layers, "select_layer": select}


def encoder_words(encoder: Encoder, small: dict[str, Any]) -> str:
    """What became smaller."""
    sizes = ("seconds", "mels") if isinstance(encoder, Audio) else ("image_size",)
    fields = (*sizes, "width", "layers", "heads", encoder.slots_field)
    return ", ".join(f"{field} {getattr(encoder, field)} → {small[field]}" for field in fields)
