"""WebDataset archives: tar files of samples, read as they come, with nothing that a header says taken on trust."""

import io
import itertools
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from meshwright.data.lines import LONGEST_RECORD_BYTES
from meshwright.data.raw.bad import TOO_LONG, WRONG_FIELD
from meshwright.data.raw.items import Bad, Item, Medium, Taking, from_bytes
from meshwright.data.raw.media import LARGEST_ITEM_BYTES, MediaTaking, Member
from meshwright.errors import UserError

_TEXT_MEMBERS = frozenset({"txt", "text", "md"})
_LONGEST_HEADER_BYTES = 1 << 20
"""Of a member's long name and other notes, which tarfile reads whole."""
_FRUITLESS_READS = 64


def samples_of(name: str, stream: BinaryIO, taking: Taking, held: bool = True, located: bool = False) -> Iterator[Item]:
    """Neighbouring members with one key are a sample; its text is its .txt, else its .json's field.

    Pictures and their like are held in memory, or left where they are; `located` if that can be read from the middle.
    """
    with _headers_doubted():
        opened = tarfile.open(fileobj=cast(Any, _Ending(stream)), mode="r|", tarinfo=_Header)  # noqa: SIM115
    with opened as archive:
        if isinstance(taking, MediaTaking):
            yield from _media_samples(name, archive, taking, held, located)
            return
        for key, group in itertools.groupby(_members(archive), key=lambda member: _key_and_suffix(member.name)[0]):
            found: dict[str, Item] = {}
            for member in group:
                suffix = _key_and_suffix(member.name)[1]
                where = f"{name}:{member.name}"
                if suffix != "json" and not (taking.plain and suffix in _TEXT_MEMBERS):
                    continue
                if member.size > LONGEST_RECORD_BYTES:
                    found[suffix] = Bad(TOO_LONG, where)
                    continue
                raw = _bytes_of(archive, member)
                found[suffix] = taking.from_json(raw, where) if suffix == "json" else from_bytes(raw, where)
            texts = [item for suffix, item in found.items() if suffix != "json"] or list(found.values())
            yield texts[0] if texts else Bad(WRONG_FIELD, f"{name}:{key}")


def _media_samples(
    name: str, archive: tarfile.TarFile, taking: MediaTaking, held: bool, located: bool
) -> Iterator[Item]:
    """Samples with pictures, film and sound."""
    for key, group in itertools.groupby(_members(archive), key=lambda member: _key_and_suffix(member.name)[0]):
        texts: list[tuple[str, bytes]] = []
        media: list[Member] = []
        too_long = False
        for member in group:
            suffix = _key_and_suffix(member.name)[1]
            field = taking.field_of(suffix)
            bound = LARGEST_ITEM_BYTES if field is not None and not held else LONGEST_RECORD_BYTES
            if field is not None and member.size <= bound:
                data = _bytes_of(archive, member) if held else None
                where = f"{name}:{member.name}"
                medium = Medium(field, where, member.offset_data, member.size, data, located=located)
                media.append(Member(suffix, medium))
            elif field is not None or member.size > bound:
                too_long = True
            elif taking.reads(suffix):
                texts.append((suffix, _bytes_of(archive, member)))
        where = f"{name}:{key}"
        yield Bad(TOO_LONG, where) if too_long else taking.from_members(texts, media, where, key.rpartition("/")[2])


def _bytes_of(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    raw = cast(BinaryIO, archive.extractfile(member)).read()
    if len(raw) != member.size:
        raise tarfile.ReadError(f"{member.name} is cut short")
    return raw


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The regular files of an archive, each forgotten when the next is asked for."""
    while True:
        with _headers_doubted():
            member = archive.next()
        if member is None:
            return
        cast(Any, archive).members.clear()
        if member.size < 0:
            raise tarfile.ReadError(f"{member.name} is said to have {member.size} bytes")
        if member.isfile():
            yield member


@contextmanager
def _headers_doubted() -> Iterator[None]:
    """Inside, a header is parsed, which tarfile does without a care: whatever goes wrong, the archive is damaged."""
    try:
        yield
    except (UserError, OSError, EOFError, MemoryError, zlib.error, tarfile.TarError):
        raise
    except Exception as error:
        raise tarfile.ReadError(f"a header makes no sense: {error!r}") from error


class _Header(tarfile.TarInfo):
    """A member's header; tarfile would take a broken one for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        """A header out of its bytes."""
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} where a member or the end of the archive was due") from error
        if header.size < 0 or (header.type in _NOTES and header.size > _LONGEST_HEADER_BYTES):
            raise tarfile.ReadError(f"a header claims {header.size} bytes")
        return header


_NOTES = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
)


class _Ending(io.RawIOBase):
    """A stream that will not be read on and on behind its end, as tarfile does for a member said to be huge."""

    def __init__(self, inner: BinaryIO) -> None:
        super().__init__()
        self._inner, self._fruitless = inner, 0

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        raw = self._inner.read(size)
        self._fruitless = 0 if raw else self._fruitless + 1
        if self._fruitless > _FRUITLESS_READS:
            raise EOFError("a member is said to be longer than the rest of the archive")
        return raw


def _key_and_suffix(name: str) -> tuple[str, str]:
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return folder + slash + stem, suffix.lower()
