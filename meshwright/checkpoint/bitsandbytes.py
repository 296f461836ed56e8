"""Weights as transformers saves them with bitsandbytes: codes in 4 or 8 bits, with their scales beside them."""

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import UserError
from meshwright.job.adapter import BLOCK, SCALES_PER_BLOCK
from meshwright.model.quantised import Packed, dequantise_int8, dequantise_nf4, tables

NF4, INT8 = "NF4", "INT8"
FORMATS = {NF4: "nf4", INT8: "int8"}
"""What a tensor that is several in a file is called here, and the format it stands for."""
STATE, ABSMAX, NESTED = ".quant_state.bitsandbytes__nf4", ".absmax", ".nested_absmax"
"""What is beside a tensor of codes, by the ends of names; the maps that are there too are always the same."""
MAPS = (".quant_map", ".nested_quant_map")
ROW_SCALES, ROW_FORMAT = "SCB", "weight_format"
"""Of a module in 8 bits, beside its weight."""


def state_of(noted: Tensor, where: str) -> Mapping[str, Any]:
    """What bitsandbytes noted about a tensor in 4 bits; other formats than nf4 with quantised scales are refused."""
    try:
        state = json.loads(bytes(noted.tolist()))
        found = state["blocksize"], state["nested_blocksize"], float(state["nested_offset"]), tuple(state["shape"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{where} is not in nf4 with quantised scales ({type(error).__name__}: {error}); quantise it with "
            "bnb_4bit_use_double_quant = true, or use the folder of the model it was made from"
        ) from None
    whole = len(found[3]) == 2 and all(isinstance(side, int) and side > 0 for side in found[3])
    if found[:2] != (BLOCK, SCALES_PER_BLOCK) or not whole or found[3][1] % BLOCK:
        raise UserError(
            f"{where} has blocks of {found[0]} and {found[1]} in a matrix {found[3]}, where rows of whole blocks of "
            f"{BLOCK} and {SCALES_PER_BLOCK} are supported; use the folder of the model it was made from"
        )
    return {"offset": found[2], "shape": found[3]}


def require_parts(
    dtype: str, size: tuple[int, ...], parts: Mapping[str, tuple[tuple[int, ...], str]], where: str
) -> None:
    """Refuse parts (their sizes and number formats) that do not make up a matrix of this size."""
    if dtype == INT8:
        wanted = {"": (prod(size), "I8"), ROW_SCALES: (size[0] if len(size) == 2 else 0, "F32")}
    else:
        blocks = prod(size) // BLOCK
        wanted = {"": (prod(size) // 2, "U8"), ABSMAX: (blocks, "U8"), NESTED: (-(-blocks // SCALES_PER_BLOCK), "F32")}
    for end, (count, format_) in wanted.items():
        found, stored_as = parts[end]
        if prod(found) != count or stored_as != format_ or count == 0:
            raise UserError(
                f"{where}{end} has the size {found} in {stored_as}, where {count} numbers in {format_} are needed; "
                "download the folder again"
            )


class Codes:
    """A stored matrix, sliced like what it stands for; whole it is also there as it is stored."""

    def __init__(self, dtype: str, size: tuple[int, ...], offset: float, slices: Mapping[str, Any]) -> None:
        self._dtype, self._size, self._offset, self._slices = dtype, size, offset, slices

    def packed(self) -> Packed:
        """As it is stored."""
        codes = self._slices[""][:]
        if self._dtype == INT8:
            return Packed(codes, None, self._scales())
        outputs, inputs = self._size
        absmax_OG = self._slices[ABSMAX][:].view(outputs, inputs // BLOCK)
        return Packed(codes.view(outputs, inputs // 2), absmax_OG, self._scales())

    def __getitem__(self, index: Any) -> Tensor:
        rows, *rest = index if isinstance(index, tuple) else (index,)
        first, last, _ = rows.indices(self._size[0])
        if self._dtype == INT8:
            return dequantise_int8(self._slices[""][first:last], self._scales()[first:last], torch.float32)[:, *rest]
        groups = self._size[1] // BLOCK
        half, count = self._size[1] // 2, last - first
        codes = self._slices[""][first * half : last * half].view(count, half)
        absmax_OG = self._slices[ABSMAX][first * groups : last * groups].view(count, groups)
        made = dequantise_nf4(codes, absmax_OG, self._scales(), tables(), (first, 0, groups), torch.float32)
        return made[:, *rest]

    def _scales(self) -> Tensor:
        if self._dtype == INT8:
            row_scales: Tensor = self._slices[ROW_SCALES][:].float()
            return row_scales
        return torch.cat((torch.tensor([self._offset]), self._slices[NESTED][:].float()))
