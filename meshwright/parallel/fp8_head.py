"""The head's products in fp8: logits, and both gradients, a chunk of tokens at a time.

One scale per tensor: of the weight, and of each chunk's hidden states and gradients. The gradient of the logits is a
probability almost everywhere, down to 1 / vocabulary and below, which takes e5m2's range rather than a finer scale.
N tokens, D width, V vocabulary, W the vocabulary in whole lines of memory.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.cost import in_whole_lines
from meshwright.errors import UserError
from meshwright.hardware.torch_versions import HAS_TRITON
from meshwright.model.head import Head, Products
from meshwright.parallel.fp8 import FORWARD, GRADIENT, fp8_both_ways
from meshwright.parallel.vocabulary import VocabularyParallelHead
from meshwright.torch_private.arithmetic import scaled_mm


def use_fp8_in_head(model: nn.Module) -> None:
    """Let a model's head compute in fp8, in place."""
    heads = [module for module in model.modules() if isinstance(module, Head | VocabularyParallelHead)]
    if not heads:
        raise UserError(
            "precision.fp8_head = true needs a head of meshwright.model.head, which computes the loss by chunks, and "
            "model.file has none; use it there or set precision.fp8_head = false"
        )
    for head in heads:
        head.products = Fp8Products


class Fp8Products(Products):
    """The products of a head with fp8 operands, summed in float32."""

    def __init__(self, weight_VD: Tensor) -> None:
        missing = in_whole_lines(len(weight_VD)) - len(weight_VD)
        self.weight_WD = F.pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD
        self.scale = _scale(self.weight_WD, FORWARD)
        self.narrow_WD, self.narrow_DW = _both_ways(self.weight_WD, self.scale, FORWARD)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Of a chunk, in the hidden states' format."""
        scale = _scale(hidden_ND, FORWARD)
        narrow_ND, self._narrow_DN = _both_ways(hidden_ND, scale, FORWARD)
        self._hidden_scale = scale
        return scaled_mm(
            narrow_ND, self.narrow_WD.t(), scale, self.scale, out_dtype=hidden_ND.dtype, use_fast_accum=True
        )

    def gradients(
        self, grad_NW: Tensor, hidden_ND: Tensor, grad_hidden_ND: Tensor, grad_weight_WD: Tensor | None
    ) -> None:
        """Write a chunk's gradient of the hidden states, and add its share of the weight's."""
        scale = _scale(grad_NW, GRADIENT)
        narrow_NW, narrow_WN = _both_ways(grad_NW, scale, GRADIENT)
        dtype = grad_hidden_ND.dtype
        grad_hidden_ND.copy_(scaled_mm(narrow_NW, self.narrow_DW.t(), scale, self.scale, out_dtype=dtype))
        if grad_weight_WD is not None:
            wide = grad_weight_WD.dtype
            grad_weight_WD += scaled_mm(narrow_WN, self._narrow_DN.t(), scale, self._hidden_scale, out_dtype=wide)


def _scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As `quantise` has it, without a copy of x: of the logits' gradient it would be as large as the logits."""
    low, high = x.aminmax()
    largest = torch.maximum(high, -low).float()
    return (largest / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)


def _both_ways(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in fp8, and the same transposed, each contiguous."""
    if x.is_cuda and HAS_TRITON:
        plain, turned = fp8_both_ways(x, scale, dtype, True)
        return plain, turned
    largest = torch.finfo(dtype).max
    narrow = (x.float() / scale).clamp(-largest, largest).to(dtype)
    return narrow, narrow.t().contiguous()
