"""The weights of a run that trained only some, as those of a whole model, any window of a parameter at a time: what it
trained, what it started from, and that with the product of an adapter added."""

from pathlib import Path

from torch import Tensor

from meshwright.checkpoint.base import base_fingerprint, frozen_rows, require_base
from meshwright.checkpoint.hf_read import parameter_sizes
from meshwright.checkpoint.reading import Checkpoint
from meshwright.checkpoint.weights import StoredWeights
from meshwright.job import Model
from meshwright.model.adapter import MAGNITUDE, A, B, merged


class MergedWeights(StoredWeights):
    """Reads as the weights of the shape without adapters; what was not trained is in what the run started from."""

    def __init__(self, run: Path, shape: Model, seed: int, checkpoint: Checkpoint | None = None) -> None:
        super().__init__(run, checkpoint)
        require_base(self.checkpoint, shape, base_fingerprint(shape, seed))
        self._scale = 0.0 if shape.adapter is None else shape.adapter.scale
        self._base, self._trained = frozen_rows(shape, seed), self.sizes
        self.sizes = parameter_sizes(shape.base)

    def read(self, name: str, window: tuple[slice, ...]) -> Tensor:
        """A window of a parameter with its adapter, in fp32."""
        if name in self._trained:
            return super().read(name, window)
        rows, columns = window[0], window[1:]
        values = self._base(name, self.sizes[name], rows).float()
        module = name.removesuffix("weight")
        if name.endswith(".weight") and f"{module}{A}" in self._trained:
            magnitude = self._own(f"{module}{MAGNITUDE}", rows) if f"{module}{MAGNITUDE}" in self._trained else None
            values = merged(
                values, self._own(f"{module}{A}", slice(None)), self._own(f"{module}{B}", rows), magnitude, self._scale
            )
        return values[(slice(None), *columns)]

    def _own(self, name: str, rows: slice) -> Tensor:
        """Some rows of an adapter's parameter."""
        size = self._trained[name]
        box = [slice(*rows.indices(size[0])[:2]), *(slice(0, other) for other in size[1:])]
        with self.checkpoint:
            return self.checkpoint.read(f"model/{name}", box)
