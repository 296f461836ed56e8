"""The schema of a checkpoint's JSON files: unknown names, wrong types and odd file names are refused."""

import math
import re
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import Tensor

FORMAT = 1
_FILE = re.compile(
    r"(?:model|optimizer|feedback|routing|data|rng)(?:-rank\d{5})?(?:-\d{3})?\.safetensors|index\.json|job\.json"
)


def _known_file(name: str) -> str:
    if not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} is not a file of a checkpoint")
    return name


FileName = Annotated[str, AfterValidator(_known_file)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Ranks = Annotated[int, Field(ge=1, lt=2**31)]
Sizes = Annotated[tuple[Count, ...], Field(max_length=16)]
"""One number for each dim; products of more and larger ones would take forever to compute."""


class Record(BaseModel):
    """A frozen model that rejects unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Facts(Record):
    """A run's progress, apart from its tensors."""

    step: Count
    """Optimizer steps taken."""
    tokens: Count
    """Tokens seen."""
    position: Count
    """Samples taken from the global stream, independent of the number of ranks and workers."""
    loss: float | None = None
    """Of the last step."""
    first_val_loss: float | None = None
    val_loss: float | None = None
    loss_scale: float | None = None
    """None where the number format needs none."""
    good_steps: Count = 0
    """Steps in a row since the loss scale last changed."""
    skipped: Count = 0
    """Steps skipped because scaled gradients overflowed."""
    recent_losses: tuple[float, ...] = ()
    """What the next loss is compared with where spikes are detected."""
    replicas: Ranks = 1
    """Ranks that each had their own error-feedback memory."""
    data: str = ""
    """Fingerprint of the training tokens."""
    base: str = ""
    """Fingerprint of the weights that are not trained; empty if all are."""


class PieceRecord(Record):
    """A box of a tensor: its offset in the whole, its size, and its file."""

    file: FileName
    offsets: Sizes
    shape: Sizes


class TensorRecord(Record):
    """A whole tensor of the state and the boxes it was saved in."""

    shape: Sizes
    dtype: str
    pieces: tuple[PieceRecord, ...]


def is_whole(tensor: TensorRecord) -> bool:
    """Whether a tensor's boxes are within it, do not overlap and cover all of it."""
    if not all(len(piece.offsets) == len(piece.shape) == len(tensor.shape) for piece in tensor.pieces):
        return False
    ends = [
        (piece, [at + size for at, size in zip(piece.offsets, piece.shape, strict=True)]) for piece in tensor.pieces
    ]
    if any(end > whole for _, stops in ends for end, whole in zip(stops, tensor.shape, strict=True)):
        return False
    if sum(math.prod(piece.shape) for piece in tensor.pieces) != math.prod(tensor.shape):
        return False
    # The number of entries matches, so only an overlap can leave a gap. In order of their first rows, a box
    # is compared with those that begin before it ends.
    ordered = sorted(ends, key=lambda box: box[0].offsets)
    for number, (piece, stops) in enumerate(ordered):
        for other, others_stops in islice(ordered, number + 1, None):
            if stops and other.offsets[0] >= stops[0]:
                break
            shared = zip(piece.offsets, stops, other.offsets, others_stops, strict=True)
            if all(max(a, c) < min(b, d) for a, b, c, d in shared):
                return False
    return True


class FileRecord(Record):
    """A file as it was written."""

    bytes: Count
    sha256: str


class Share(Record):
    """What one rank wrote."""

    files: dict[FileName, FileRecord]
    tensors: dict[str, TensorRecord]
    held: tuple[str, ...] = ()
    """Tensors of which this rank holds a part, whichever holder writes it."""


class Index(Record):
    """index.json: the run's progress and where every tensor is stored."""

    format: int
    attempt: Count
    ranks: Ranks
    facts: Facts
    tensors: dict[str, TensorRecord]


class Manifest(Record):
    """manifest.json, written last: every file's size and hash."""

    format: int
    step: Count
    attempt: Count
    time: str
    files: dict[FileName, FileRecord]
    seal: str
    """Hash of all of the above."""


@dataclass(frozen=True)
class Part:
    """One rank's box of a tensor of the state; names are GROUP/REST, and each group has its own files."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    values: Tensor

    @property
    def group(self) -> str:
        """What the tensor belongs to: model, optimizer, feedback, data or rng."""
        return self.name.partition("/")[0]

    @property
    def key(self) -> str:
        """Its name in a file: the tensor's own, with the offsets where it is not the whole."""
        rest = self.name.partition("/")[2]
        return rest if tuple(self.values.shape) == self.shape else f"{rest}@{','.join(map(str, self.offsets))}"


@dataclass(frozen=True)
class State:
    """All that one rank contributes to a checkpoint."""

    facts: Facts
    parts: list[Part]
    held: tuple[str, ...] = ()
    """The names of all tensors this rank holds a part of, including those that others write: each must be written."""
