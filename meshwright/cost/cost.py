"""What a part of the model costs: parameters, FLOPs and the bytes it keeps for its backward; FLOP totals of a shape.

Only matrix products and attention are counted as FLOPs, a multiply-add as two, attention over every pair of positions
(a causal kernel does about half of that), and its backward with the scores recomputed, as the fused kernels do it.
Saved bytes are what eager training without recomputation holds between forward and backward, parameters aside.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from meshwright.cost.parameters import encoder_flops, matmul_parameters
from meshwright.job import Model


@dataclass(frozen=True)
class Cost:
    """Parameters, matmul and attention FLOPs, and the saved tensors by name with their bytes."""

    parameters: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    saved_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def saved_total(self) -> int:
        """All bytes kept from forward to backward."""
        return sum(self.saved_bytes.values())

    def __add__(self, other: "Cost") -> "Cost":
        twice = self.saved_bytes.keys() & other.saved_bytes.keys()
        if twice:
            raise ValueError(f"saved tensors named twice: {sorted(twice)}")
        return Cost(
            self.parameters + other.parameters,
            self.forward_flops + other.forward_flops,
            self.backward_flops + other.backward_flops,
            {**self.saved_bytes, **other.saved_bytes},
        )

    def within(self, name: str) -> "Cost":
        """The same cost as part of something larger: every saved tensor's name gets `name.` in front."""
        saved = {f"{name}.{key}": value for key, value in self.saved_bytes.items()}
        return Cost(self.parameters, self.forward_flops, self.backward_flops, saved)


def saved(**tensors: tuple[int, int]) -> Cost:
    """A cost of saved tensors alone, each given as (elements, bytes of one)."""
    return Cost(saved_bytes={name: count * each for name, (count, each) in tensors.items()})


def flops_per_token(shape: Model, sequence: int, attention: Literal["causal", "full"]) -> float:
    """Model FLOPs to train on one token: 6 per matmul weight that it uses, 4 if it is frozen, and 6 per layer, seen
    position and channel of keys and of values.

    A token sees the whole sequence ("full"), or what its causal mask leaves on average, half of it; a sliding window
    shorter than the sequence bounds both. The pictures or sound of a sequence are spread over its tokens.
    """
    every_second = shape.blocks // 2 if shape.window_layers == "alternate" else 0
    seen = 0.0
    for layers, width in ((shape.blocks - every_second, shape.sliding_window), (every_second, None)):
        window = min(sequence, width or sequence)
        seen += layers * (window if attention == "full" else window * (1 - window / (2 * sequence)))
    products = 6.0 * matmul_parameters(shape)
    if shape.adapter is not None:  # next to adapters no gradients of weights are computed
        products -= 2.0 * matmul_parameters(shape.base)
    total = products + 6.0 * seen * shape.heads * (shape.head_dim + shape.value_dim)
    if shape.encoder is not None:
        total += encoder_flops(shape, shape.encoder) * shape.encoder.slots / sequence
    return total
