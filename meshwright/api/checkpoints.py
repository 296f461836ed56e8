"""`meshwright.Checkpoint`: the tensors of a checkpoint, whatever layout saved them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class Checkpoint:
    """A complete checkpoint: `checkpoint[name]` is a tensor, `read` any box of one; only what is asked for is read."""

    def __init__(self, path: Path | str) -> None:
        """`path` is a checkpoint's folder, or a run folder, whose newest complete checkpoint it is then."""
        from meshwright.checkpoint import open_checkpoint

        self._saved = open_checkpoint(Path(path))
        self.path = self._saved.path

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self)} tensors)"

    def __len__(self) -> int:
        return len(self._saved.index.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved.index.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._saved.index.tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    @property
    def step(self) -> int:
        """The step it was saved after."""
        return self._saved.facts.step

    @property
    def facts(self) -> dict[str, Any]:
        """Where the run stood: step, tokens, loss and so on."""
        return self._saved.facts.model_dump()

    def job(self) -> dict[str, Any]:
        """The job it was saved by: section → field → value."""
        return self._saved.job()

    def names(self, prefix: str = "") -> list[str]:
        """The tensors whose names begin so: model/…, optimizer/…, rng/…"""
        return self._saved.names(prefix)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape as a whole."""
        return self._saved.shape(self._known(name))

    def read(self, name: str, box: Sequence[slice] = ()) -> Tensor:
        """A tensor, or a box of it: slices for its first dims, as (slice(0, 10), slice(None)); the rest is whole."""
        shape = self.shape(name)
        if len(box) > len(shape):
            raise UserError(f"{name} has {len(shape)} dims and the box {len(box)}; give a slice for each at most")
        wanted = [*box, *(slice(None) for _ in shape[len(box) :])]
        spans = [slice(*span.indices(size)) for span, size in zip(wanted, shape, strict=True)]
        if odd := [span for span in spans if span.step != 1]:
            raise UserError(f"{odd[0]} takes every {odd[0].step}th entry; read all of them and choose")
        return self._saved.read(name, [slice(span.start, max(span.start, span.stop)) for span in spans])

    def verify(self) -> None:
        """Read every byte; what is not as it was written is refused by name."""
        self._saved.verify()

    def differences(self, other: Checkpoint) -> dict[str, str]:
        """The tensors that are not equal bit for bit, each with what differs."""
        from meshwright.checkpoint import differences

        return dict(differences(self._saved, other._saved))

    def export(self, out: Path | str, dtype: str = "fp32") -> Path:
        """Write the weights as a Hugging Face folder in fp32 or bf16, and return its path."""
        from meshwright.runs.huggingface import export_run

        export_run(self.path.parents[1], Path(out), dtype, checkpoint=self._saved)
        return Path(out)

    def _known(self, name: str) -> str:
        if name not in self:
            import difflib

            close = difflib.get_close_matches(name, list(self), n=1)
            remedy = f"did you mean {close[0]}?" if close else "names() lists them"
            raise UserError(f"{self.path} has no tensor {name}; {remedy}")
        return name
