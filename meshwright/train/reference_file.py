"""What the start weights give a run's pairs, kept in its folder and tied by hashes to those weights and to the data."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from meshwright.atomic import write_atomic
from meshwright.data import Corpus, References
from meshwright.data.files import open_regular
from meshwright.errors import UserError
from meshwright.job import Job, start_folder
from meshwright.train.feed import fingerprint
from meshwright.train.preference import PairReferences

FILE = "reference.safetensors"
IMPORTED = "imported"
"""The identity of start weights that were imported into the run's first checkpoint: they cannot be built again."""
_LOOKS, _LOOK_BYTES = 64, 4096


def start_identity(job: Job) -> str | None:
    """A hash of the weights a job starts from: of its shape and seed, or of its folder's files by their sizes and looks
    all over them; None if that folder is gone."""
    shape = job.model.model_dump(mode="json", exclude={"init_from", "dropout"})
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    if job.model.init_from is None:
        digest.update(str(job.run.seed).encode())
        return digest.hexdigest()
    folder = start_folder(job.model)
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for look in range(_LOOKS):
                stream.seek(look * size // _LOOKS)
                digest.update(stream.read(_LOOK_BYTES))
    return digest.hexdigest() if files else None


def write_references(run: Path, references: PairReferences, corpus: Corpus, start: str) -> None:
    """Keep them in a run's folder."""
    arrays: dict[str, NDArray[Any]] = {}
    for split, known in (("train", references.train), ("validation", references.validation)):
        arrays |= {f"{split}.starts": known.starts_N, f"{split}.sums": np.ascontiguousarray(known.sums_N2)}
    write_atomic(run / FILE, save(arrays, {"start": start, "data": fingerprint(corpus)}), durable=True)


def read_references(run: Path, job: Job, corpus: Corpus) -> tuple[PairReferences, str] | None:
    """Those of a run's folder and the identity of the weights that gave them, None if there are none; refuses those of
    other weights or other data."""
    path = run / FILE
    if not path.is_file():
        return None
    try:
        open_regular(path).close()
        with safe_open(path, framework="numpy") as file:
            told = file.metadata() or {}
            train, validation = (
                References(file.get_tensor(f"{split}.starts"), file.get_tensor(f"{split}.sums"))
                for split in ("train", "validation")
            )
            start, data = told["start"], told["data"]
        _require_shapes(train, validation)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({error}); restore it, or start a new run with another run.folder"
        ) from None
    if data != fingerprint(corpus):
        raise UserError(
            f"{path} belongs to other pairs than data.sources hold now; restore them, or start a new run with another "
            "run.folder"
        )
    if start not in (IMPORTED, start_identity(job) or start):
        raise UserError(
            f"{path} belongs to other start weights than model.init_from = {job.model.init_from} with run.seed = "
            f"{job.run.seed}; restore them, or start a new run with another run.folder"
        )
    return PairReferences(train, validation), start


def _require_shapes(*splits: References) -> None:
    for known in splits:
        shapes = known.starts_N.dtype == np.int64 and known.sums_N2.shape == (len(known.starts_N), 2)
        if not shapes or known.sums_N2.dtype != np.float64 or not (np.diff(known.starts_N) > 0).all():
            raise ValueError("its arrays do not fit together")
