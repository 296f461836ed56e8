"""Weights as transformers with bitsandbytes loads them: projections as codes in 4 or 8 bits, the rest in bf16."""

import json
from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.bitsandbytes import ABSMAX, MAPS, NESTED, ROW_FORMAT, ROW_SCALES, STATE
from meshwright.checkpoint.tensorfile import Planned
from meshwright.errors import UserError
from meshwright.job import Model
from meshwright.job.adapter import BLOCK, SCALES_PER_BLOCK
from meshwright.model.quantised import NORMAL_FLOAT, Packed, dynamic_codes, finish, quantise_rows

Pack = Callable[[str], Packed]
_ROWS = 512
"""Quantised at a time."""
_LONGEST_NUMBER = 24
"""Characters of the mean of scales, which is not known before its matrix is quantised."""
_BY_ROWS = 0
"""What bitsandbytes calls the order of codes that its products take."""


def quantization_config(format_: str) -> dict[str, Any]:
    """What transformers reads from config.json."""
    config: dict[str, Any] = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"]}
    if format_ == "int8":
        return config | {"load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0}
    how = {"quant_type": "nf4", "use_double_quant": True, "compute_dtype": "bfloat16", "quant_storage": "uint8"}
    return config | {"load_in_4bit": True, "load_in_8bit": False} | {f"bnb_4bit_{key}": how[key] for key in how}


def require_packable(shape: Model, format_: str) -> None:
    """Refuse models that bitsandbytes would have otherwise, or only in part."""
    field = f"--dtype = {format_}"
    others = {
        "model.experts": shape.experts is not None,
        "model.latent": shape.latent is not None,
        "model.vision": shape.vision is not None,
        'model.positions = "learned"': shape.positions == "learned",
    }
    for other, has in others.items():
        if has:
            raise UserError(f"{field} is not for models with {other}; export it with --dtype bf16")
    odd = [size for size in (shape.width, shape.ffn_width, shape.heads * shape.head_dim) if size % BLOCK]
    if format_ == "nf4" and odd:
        raise UserError(
            f"{field} needs rows of whole blocks of {BLOCK} numbers, and this model has projections of {odd[0]} inputs;"
            " export it with --dtype int8"
        )


def in_codes(tensors: Sequence[Planned], chosen: Container[str], format_: str) -> Iterator[Planned]:
    """What is written for tensors of which the chosen ones, all of them matrices, are quantised."""
    planned = {tensor.name: tensor for tensor in tensors}

    @lru_cache(maxsize=1)  # what a matrix becomes is written one after the other, in at most two turns
    def packed(name: str) -> Packed:
        tensor = planned[name]
        starts = range(0, tensor.size[0], _ROWS)
        rows = [quantise_rows(tensor.rows(slice(start, start + _ROWS)), format_) for start in starts]
        codes, scales = zip(*rows, strict=True)
        return finish(torch.cat(codes), torch.cat(scales), format_)

    for tensor in tensors:
        if tensor.name not in chosen:
            yield tensor
        elif format_ == "int8":
            yield from _as_int8(tensor, packed)
        else:
            yield from _as_nf4(tensor, packed)


def _as_int8(tensor: Planned, packed: Pack) -> Iterator[Planned]:
    name, module = tensor.name, tensor.name.removesuffix("weight")
    yield Planned(name, tensor.size, torch.int8, lambda rows: packed(name).codes[rows])
    yield Planned(f"{module}{ROW_SCALES}", tensor.size[:1], torch.float32, lambda rows: packed(name).scales[rows])
    yield Planned.of(f"{module}{ROW_FORMAT}", torch.tensor(_BY_ROWS, dtype=torch.uint8))


def _as_nf4(tensor: Planned, packed: Pack) -> Iterator[Planned]:
    name, (outputs, inputs) = tensor.name, tensor.size
    blocks = outputs * inputs // BLOCK
    nested = -(-blocks // SCALES_PER_BLOCK)
    length = len(_noted(tensor, 0.0)) + _LONGEST_NUMBER

    def absmax(rows: slice) -> Tensor:
        found = packed(name).absmax_OG
        assert found is not None
        return found.flatten()[rows]

    def state(rows: slice) -> Tensor:
        text = _noted(tensor, float(packed(name).scales[0])).ljust(length)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)[rows]

    yield Planned(name, (outputs * inputs // 2, 1), torch.uint8, lambda rows: packed(name).codes.view(-1, 1)[rows])
    yield Planned(f"{name}{ABSMAX}", (blocks,), torch.uint8, absmax)
    yield Planned(f"{name}{STATE}", (length,), torch.uint8, state)
    yield Planned(f"{name}{NESTED}", (nested,), torch.float32, lambda rows: packed(name).scales[1:][rows])
    for end, numbers in zip(MAPS, (torch.tensor(NORMAL_FLOAT), dynamic_codes()), strict=True):
        yield Planned.of(f"{name}{end}", numbers)


def _noted(tensor: Planned, offset: float) -> str:
    """What bitsandbytes notes about a tensor in 4 bits."""
    state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": list(tensor.size)}
    nested = {"nested_blocksize": SCALES_PER_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    return json.dumps(state | nested)
