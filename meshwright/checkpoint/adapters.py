"""The weights of a run that trained adapters, as those of a model without: every parameter with its adapter's product
added, any window of it at a time."""

from pathlib import Path

from torch import Tensor

from meshwright.checkpoint.base import base_fingerprint, first_rows, require_base
from meshwright.checkpoint.hf_read import parameter_sizes
from meshwright.checkpoint.reading import Checkpoint
from meshwright.checkpoint.weights import StoredWeights
from meshwright.job import Model
from meshwright.model.adapter import MAGNITUDE, A, B, merged


class MergedWeights(StoredWeights):
    """Reads as the weights of the shape without adapters: they are in what the run started from."""

    def __init__(self, run: Path, shape: Model, seed: int, checkpoint: Checkpoint | None = None) -> None:
        super().__init__(run, checkpoint)
        assert shape.adapter is not None
        require_base(self.checkpoint, shape, base_fingerprint(shape, seed))
        self._scale, self._base, self._adapters = shape.adapter.scale, first_rows(shape.base, seed), self.sizes
        self.sizes = parameter_sizes(shape.base)

    def read(self, name: str, window: tuple[slice, ...]) -> Tensor:
        """A window of a parameter with its adapter, in fp32."""
        rows, columns = window[0], window[1:]
        values = self._base(name, self.sizes[name], rows).float()
        module = name.removesuffix("weight")
        if name.endswith(".weight") and f"{module}{A}" in self._adapters:
            magnitude = self._own(f"{module}{MAGNITUDE}", rows) if f"{module}{MAGNITUDE}" in self._adapters else None
            values = merged(
                values, self._own(f"{module}{A}", slice(None)), self._own(f"{module}{B}", rows), magnitude, self._scale
            )
        return values[(slice(None), *columns)]

    def _own(self, name: str, rows: slice) -> Tensor:
        """Some rows of an adapter's parameter."""
        size = self._adapters[name]
        box = [slice(*rows.indices(size[0])[:2]), *(slice(0, other) for other in size[1:])]
        with self.checkpoint:
            return self.checkpoint.read(f"model/{name}", box)
