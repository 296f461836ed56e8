"""Samples written as a WebDataset that Megatron Energon reads: tars, and its description of them in .nv-meta."""

import io
import json
import sqlite3
import struct
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.atomic import sync, write_atomic
from meshwright.data.cache import building
from meshwright.data.media.examine import Examiner
from meshwright.data.media.take import media_taking
from meshwright.data.prepared.fill import Wishes
from meshwright.data.raw import Bad, BadDocuments, MediaTaking, Medium, Taking, Text, list_inputs, plan_units, read_unit
from meshwright.data.raw.energon import META
from meshwright.data.raw.media import with_placeholders
from meshwright.data.split import HeldOut
from meshwright.errors import UserError

SHARD_BYTES = 1 << 30
_BLOCK = 512
_ENDINGS = ((b"\xff\xd8\xff", "jpg"), (b"\x89PNG", "png"), (b"GIF8", "gif"), (b"BM", "bmp"))
_KIND_ENDINGS = {"image": "img", "video": "mp4", "audio": "wav"}


@dataclass(frozen=True)
class Exported:
    """What was written."""

    samples: dict[str, int]
    """By split."""
    shards: int
    bad: BadDocuments


def export_webdataset(wishes: Wishes, out: Path, shard_bytes: int = SHARD_BYTES) -> Exported:
    """Write the samples of the sources as shards of a new folder, those that are damaged left out and counted."""
    taking = media_taking(Taking(wishes.text_field), wishes.fields, wishes.encoder, wishes.check, wishes.sources)
    if not isinstance(taking, MediaTaking):
        raise UserError(
            "--format webdataset writes samples with pictures, film or sound; describe them with --fields JOB"
        )
    if out.exists():
        raise UserError(f"--out {out} exists; choose another folder")
    bad = BadDocuments()
    with building(out, lambda folder: False) as draft:
        writers = {split: _Shards(draft, split, shard_bytes) for split in ("train", "val")}
        held_out = HeldOut(wishes.validation_fraction)
        for number, (text, raws) in enumerate(_samples(wishes, taking, bad)):
            writer = writers["val" if held_out.whole(number) else "train"]
            writer.add(f"{number:09}", _members(text, raws, taking))
        good = sum(writer.samples for writer in writers.values())
        if bad.against_limit > wishes.max_bad * (bad.against_limit + good):
            raise UserError(
                f"{bad.against_limit} of {bad.against_limit + good} samples cannot be used ({bad.sentence()}), more "
                f"than --max-bad {wishes.max_bad:g} allows; fix them or raise it"
            )
        if not writers["train"].samples:
            raise UserError(f"{', '.join(wishes.sources)} hold no sample to write; name others")
        shards = [shard for writer in writers.values() for shard in writer.finish()]
        _describe(draft, shards, writers)
        (draft / ".lock").unlink(missing_ok=True)
    return Exported({split: writer.samples for split, writer in writers.items()}, len(shards), bad)


def _samples(wishes: Wishes, taking: MediaTaking, bad: BadDocuments) -> Iterator[tuple[Text, list[bytes]]]:
    files = list_inputs(wishes.sources).files
    examiner = Examiner(taking, [file.name for file in files])
    for unit in plan_units(files):
        for item in read_unit(unit, taking):
            found = item if isinstance(item, Bad) else examiner.look(item)
            if isinstance(found, Bad):
                bad.add(found.kind, found.place)
            else:
                yield found, [examiner.read(found, medium) for medium in found.media]


def _members(text: Text, raws: list[bytes], taking: MediaTaking) -> list[tuple[str, bytes]]:
    """The files of a sample by their endings, numbered where there are several of one field."""
    found = []
    fields = [medium.field for medium in text.media]
    for place, (medium, raw) in enumerate(zip(text.media, raws, strict=True)):
        kind = taking.media[medium.field][1].kind
        ending = next((name for sign, name in _ENDINGS if raw.startswith(sign)), None) if kind == "image" else None
        ending = ending or ("webp" if raw[8:12] == b"WEBP" else None) or _own_ending(medium) or _KIND_ENDINGS[kind]
        if fields.count(medium.field) > 1:
            ending = f"{fields[:place].count(medium.field)}.{ending}"
        found.append((ending, raw))
    return [*found, ("txt", with_placeholders(text.text, taking).encode("utf-8"))]


def _own_ending(medium: Medium) -> str | None:
    ending = medium.name.rpartition(".")[2].lower()
    return ending if ending.isalnum() and len(ending) <= 5 else None


@dataclass
class _Shards:
    """The shards of one split, each closed when it is large enough."""

    folder: Path
    split: str
    largest_bytes: int
    samples: int = 0
    names: list[str] = field(default_factory=list)
    endings: set[tuple[str, ...]] = field(default_factory=set)
    rows: list[tuple[str, int, str, int, int, list[tuple[str, int, int]]]] = field(default_factory=list)
    """Of every sample its shard, number, key, offset and size, and the endings, offsets and sizes of its members."""
    _archive: tarfile.TarFile | None = None
    _offsets: list[int] = field(default_factory=list)

    def add(self, key: str, members: list[tuple[str, bytes]]) -> None:
        """One more sample."""
        if self._archive is None or self._archive.offset > self.largest_bytes:
            self._close()
            self.names.append(f"{self.split}-{len(self.names):06}.tar")
            self._archive = tarfile.open(self.folder / self.names[-1], "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        begin, parts = self._archive.offset, []
        for ending, raw in members:
            info = tarfile.TarInfo(f"{key}.{ending}")
            info.size = len(raw)
            parts.append((ending, self._archive.offset + _BLOCK, len(raw)))
            self._archive.addfile(info, io.BytesIO(raw))
        self.rows.append((self.names[-1], len(self._offsets), key, begin, self._archive.offset - begin, parts))
        self._offsets.append(begin)
        self.endings.add(tuple(ending for ending, _ in members))
        self.samples += 1

    def finish(self) -> list[str]:
        """Close the last shard; the names of all."""
        self._close()
        return self.names

    def _close(self) -> None:
        if self._archive is None:
            return
        offsets = [*self._offsets, self._archive.offset]
        self._archive.close()
        index = self.folder / f"{self.names[-1]}.idx"
        index.write_bytes(struct.pack(f"<{len(offsets)}Q", *offsets))
        sync(self.folder / self.names[-1])
        self._archive, self._offsets = None, []


def _describe(folder: Path, shards: list[str], writers: dict[str, _Shards]) -> None:
    """Energon's own description: counts, splits, what a sample is, and where every member begins."""
    meta = folder / META
    meta.mkdir()
    rows = [row for writer in writers.values() for row in writer.rows]
    counts = {name: sum(row[0] == name for row in rows) for name in shards}
    write_atomic(meta / ".info.json", json.dumps({"energon_version": "7.4.1", "shard_counts": counts}, indent=2) + "\n")
    parts = "".join(
        f"  {split}:{'' if writer.names else ' []'}\n" + "".join(f"  - {name}\n" for name in writer.names)
        for split, writer in writers.items()
    )
    write_atomic(meta / "split.yaml", f"split_parts:\n{parts}exclude: []\n")
    endings = {found for writer in writers.values() for found in writer.endings}
    write_atomic(meta / "dataset.yaml", _sample_type(endings))
    write_atomic(meta / "index.uuid", str(uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(counts))))
    with closing(sqlite3.connect(meta / "index.sqlite", isolation_level=None)) as table:
        table.execute("PRAGMA synchronous = OFF")
        table.execute("BEGIN")
        table.execute(
            "CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER "
            "NOT NULL, byte_offset INTEGER, byte_size INTEGER)"
        )
        table.execute(
            "CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset "
            "INTEGER, content_byte_size INTEGER)"
        )
        for shard, number, key, begin, size, members in rows:
            place = shards.index(shard)
            table.execute("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", (place, key, number, begin, size))
            table.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", [(place, number, *m) for m in members])
        for name, columns in (
            ("idx_samples_by_tar_and_idx", "samples(tar_file_id, sample_index)"),
            ("idx_sample_parts_seq", "sample_parts(tar_file_id, sample_index, content_byte_offset)"),
            (
                "idx_sample_parts_full",
                "sample_parts(tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size)",
            ),
        ):
            table.execute(f"CREATE INDEX {name} ON {columns}")
        table.execute("COMMIT")


def _sample_type(endings: set[tuple[str, ...]]) -> str:
    """One picture and a text are a captioning sample; all else is left to the reader's own cooker."""
    if len(endings) == 1 and len(only := next(iter(endings))) == 2 and only[0] in {name for _, name in _ENDINGS}:
        fields = f"field_map:\n  image: {only[0]}\n  caption: txt\n"
        return f"sample_type:\n  __module__: megatron.energon\n  __class__: CaptioningSample\n{fields}"
    return "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
