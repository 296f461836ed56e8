"""Writing a checkpoint: every rank writes its share into one folder, then rank 0 writes the index and the manifest.

Tensors are cut into boxes of the whole by plain index arithmetic. Torch's distributed checkpoint plans the same using
collectives, but only for shardings it can describe, and needs every rank in each save; here a rank knows from its own
position which boxes it must write, and the index of all boxes is assembled from files.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.checkpoint.records import FORMAT, Facts, FileRecord, Index, Manifest, Part, PieceRecord, Share, is_whole
from meshwright.checkpoint.records import TensorRecord as Whole
from meshwright.checkpoint.tensorfile import DTYPE_NAMES, Planned, write_safetensors

INDEX, MANIFEST, JOB = "index.json", "manifest.json", "job.json"
FILE_BYTES = 2**30
"""A rank's share is written to files of about this size, some of them at a time."""
WRITERS = 4


class Incomplete(Exception):
    """The shares of all ranks do not add up to the whole state."""


def write_share(folder: Path, parts: Iterable[Part], rank: int, ranks: int, held: Sequence[str] = ()) -> int:
    """Write one rank's boxes, which are in host memory, and a record of them; returns the bytes written.

    `held` names the tensors that this rank holds a part of and that some rank must write.
    """
    planned = list(_files(parts, rank, ranks))
    with ThreadPoolExecutor(WRITERS) as pool:
        written = list(
            pool.map(
                lambda file: write_safetensors(folder / file[0], [Planned.of(p.key, p.values) for p in file[1]]),
                planned,
            )
        )
    tensors: dict[str, Whole] = {}
    for name, some in planned:
        for part in some:
            piece = PieceRecord(file=name, offsets=part.offsets, shape=tuple(part.values.shape))
            tensors[part.name] = Whole(shape=part.shape, dtype=DTYPE_NAMES[part.values.dtype], pieces=(piece,))
    files = {name: record for (name, _), record in zip(planned, written, strict=True)}
    record_share(folder, rank, files, tensors, held)
    return sum(record.bytes for record in written)


def record_share(
    folder: Path, rank: int, files: dict[str, FileRecord], tensors: dict[str, Whole], held: Sequence[str] = ()
) -> None:
    """Record for `seal` what one rank has written."""
    _write_text(folder / _share_name(rank), Share(files=files, tensors=tensors, held=tuple(held)).model_dump_json())


def seal(folder: Path, facts: Facts, attempt: int, ranks: int, job: dict[str, Any]) -> Manifest:
    """Combine all ranks' shares into one checkpoint: check that they cover the state, write index and manifest."""
    shares = [_read_share(folder / _share_name(rank)) for rank in range(ranks)]
    tensors: dict[str, Whole] = {}
    for share in shares:
        for name, found in share.tensors.items():
            known = tensors.get(name)
            pieces = (*known.pieces, *found.pieces) if known else found.pieces
            tensors[name] = Whole(shape=found.shape, dtype=found.dtype, pieces=pieces)
    if missing := {name for share in shares for name in share.held} - tensors.keys():
        raise Incomplete(f"{min(missing)} was written by no rank")
    for name, tensor in tensors.items():
        if not is_whole(tensor):
            entries = sum(math.prod(piece.shape) for piece in tensor.pieces)
            report = f"{name} has {math.prod(tensor.shape)} entries, but {entries} were written"
            raise Incomplete(f"{report}, some of them twice" if entries == math.prod(tensor.shape) else report)
    files = {name: record for share in shares for name, record in share.files.items()}
    index = Index(format=FORMAT, attempt=attempt, ranks=ranks, facts=facts, tensors=tensors)
    files[INDEX] = _write_text(folder / INDEX, json.dumps(index.model_dump(mode="python"), separators=(",", ":")))
    files[JOB] = _write_text(folder / JOB, json.dumps(job, indent=1))
    for rank in range(ranks):
        (folder / _share_name(rank)).unlink()
    stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
    unsealed = Manifest(format=FORMAT, step=facts.step, attempt=attempt, time=stamp, files=files, seal="")
    manifest = unsealed.model_copy(update={"seal": seal_of(unsealed)})
    _write_text(folder / MANIFEST, json.dumps(manifest.model_dump(), indent=1))
    return manifest


def seal_of(manifest: Manifest) -> str:
    """The hash a manifest should carry."""
    content = json.dumps(manifest.model_dump(exclude={"seal"}), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _files(parts: Iterable[Part], rank: int, ranks: int) -> Iterator[tuple[str, list[Part]]]:
    """File names with their tensors: one group per file, split where it exceeds FILE_BYTES."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(part.group, []).append(part)
    for group, held in groups.items():
        files, room = list[list[Part]](), 0
        for part in held:
            if part.values.nbytes > room:
                files.append([])
                room = FILE_BYTES
            files[-1].append(part)
            room -= part.values.nbytes
        owner = f"-rank{rank:05d}" if ranks > 1 else ""
        for number, some in enumerate(files):
            place = f"-{number:03d}" if len(files) > 1 else ""
            yield f"{group}{owner}{place}.safetensors", some


def _share_name(rank: int) -> str:
    return f"share-{rank:05d}.json"


def _read_share(path: Path) -> Share:
    try:
        return Share.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Incomplete(f"{path.name} of another rank is missing: all ranks must see the same run.folder") from None
    except ValidationError as error:
        raise Incomplete(f"{path.name} cannot be read ({error.errors()[0]['msg']})") from None


def _write_text(path: Path, text: str) -> FileRecord:
    data = text.encode()
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
