"""Keys and values kept from one generation step to the next."""

import torch
from torch import Tensor


class KVCache:
    """What attention has seen so far, layer by layer; a decoder called with it adds to it."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """Tokens seen so far by the layers that have run."""
        return next((keys.shape[1] for keys, _ in self._layers.values()), 0)

    def crop(self, length: int) -> None:
        """Keep only the first tokens of what was seen."""
        self._layers = {layer: (k[:, :length], v[:, :length]) for layer, (k, v) in self._layers.items() if length}

    def append(self, layer: int, k_BSKE: Tensor, v_BSKE: Tensor) -> tuple[Tensor, Tensor]:
        """Add a step's keys and values to a layer's and return all of them."""
        if layer in self._layers:
            k_old, v_old = self._layers[layer]
            k_BSKE, v_BSKE = torch.cat((k_old, k_BSKE), dim=1), torch.cat((v_old, v_BSKE), dim=1)
        self._layers[layer] = (k_BSKE, v_BSKE)
        return k_BSKE, v_BSKE
