"""Stated bytes, FLOPs and parameters of a model with an encoder equal what autograd keeps and a counter sees."""

from typing import Any

import pytest
import torch
from test_model_cost import NOT_COUNTED, SMALL, B, S, counted
from torch.utils.flop_counter import FlopCounterMode

from meshwright.cost import decoder_cost, parameter_count, trained_parameters
from meshwright.job.model import Model
from meshwright.model import Decoder, Media
from meshwright.model.adapter import is_frozen

SIGLIP = {"image_size": 8, "patch": 4, "width": 12, "layers": 2, "heads": 2, "ffn_width": 20, "images": 2}
CLIP = SIGLIP | {"kind": "clip", "layers": 3, "select_layer": -2}
SOUND = {"mels": 5, "seconds": 0.07, "width": 12, "layers": 2, "heads": 2, "ffn_width": 20, "windows": 2}
CASES: dict[str, dict[str, Any]] = {
    "siglip": {"vision": SIGLIP},
    "clip": {"vision": CLIP},
    "encoder frozen": {"vision": CLIP | {"train": ("projector", "decoder")}},
    "projector frozen": {"vision": SIGLIP | {"train": ("encoder", "decoder")}},
    "decoder alone": {"vision": SIGLIP | {"train": ("decoder",)}},
    "whisper": {"audio": SOUND},
    "whisper frozen": {"audio": SOUND | {"train": ("projector", "decoder")}},
    "whisper, projector frozen": {"audio": SOUND | {"train": ("encoder", "decoder")}},
}


def model_and_media(case: str, dtype: torch.dtype) -> tuple[Decoder, Media]:
    model = Decoder(Model(**SMALL, **CASES[case])).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(model.shape, name))
    places = torch.tensor([[[0, 1, 2, 3], [-1] * 4], [[1, 2, 3, 4], [5, 6, -1, -1]]])
    if model.audio is not None:
        return model, Media(torch.randn(B, 2, 5, 7), places)
    return model, Media(torch.randint(0, 256, (B, 2, 3, 8, 8), dtype=torch.uint8), places)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_stated_bytes_equal_counted_bytes(case: str, dtype: torch.dtype) -> None:
    model, media = model_and_media(case, dtype)
    tokens = torch.randint(0, 29, (B, S))
    stated = decoder_cost(model.shape, B, S, dtype.itemsize)
    kept = counted(lambda: model(tokens, tokens, B * S, media=media), model.parameters())
    assert kept == stated.saved_total, {
        k: v for k, v in stated.saved_bytes.items() if k.startswith(("vision", "audio"))
    }


@pytest.mark.parametrize("case", CASES)
def test_stated_parameters_and_flops_equal_counted_ones(case: str) -> None:
    model, media = model_and_media(case, torch.float32)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == trained_parameters(model.shape)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(model.shape)
    tower = model.encoder
    assert tower is not None
    with_it, without = (decoder_cost(shape, B, S, 4) for shape in (model.shape, model.shape.decoder))
    with FlopCounterMode(display=False, custom_mapping=NOT_COUNTED) as forward:
        out = tower(media.items_BK)
    with FlopCounterMode(display=False, custom_mapping=NOT_COUNTED) as backward:
        if out.requires_grad:
            out.sum().backward()
    assert forward.get_total_flops() == with_it.forward_flops - without.forward_flops
    assert backward.get_total_flops() == with_it.backward_flops - without.backward_flops
