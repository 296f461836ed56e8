"""Bytes out of the middle of files, local or on a server, a few of them kept open."""

import os
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.data.files import open_regular
from meshwright.data.raw.local import unreadable
from meshwright.data.raw.media import LARGEST_ITEM_BYTES
from meshwright.data.raw.remote import RemoteFile, is_remote, list_remote
from meshwright.errors import UserError

_OPEN_FILES = 128


@dataclass(frozen=True)
class SourceFile:
    """A file that items are in, with what tells whether it is still the same."""

    name: str
    size_bytes: int | None = None
    stamp: str = ""


@dataclass
class MediaFiles:
    """Files held open by one process and its forks: reads at a place, which no other reader can move."""

    _local: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _remote: dict[str, RemoteFile] = field(default_factory=dict)
    _owner: int = field(default_factory=os.getpid)
    """A connection is that of one process; descriptors are as good in a fork."""

    def __del__(self) -> None:
        for descriptor in self._local.values():
            os.close(descriptor)

    def read(self, file: SourceFile, offset: int, size: int) -> bytes:
        """So many bytes from a place on; a file that changed since it was prepared is refused."""
        if offset < 0 or not 0 <= size <= LARGEST_ITEM_BYTES:
            raise UserError(f"{file.name}: the index has {size} bytes at {offset}, so it is damaged; prepare it again")
        if size == 0:
            return b""
        if is_remote(file.name):
            raw = self._server(file).range(offset, size)
        else:
            try:
                raw = os.pread(self._descriptor(file), size, offset)
                while len(raw) < size and (
                    more := os.pread(self._descriptor(file), size - len(raw), offset + len(raw))
                ):
                    raw += more
            except OSError as error:
                raise unreadable(file.name, error) from error
        if len(raw) != size:
            raise UserError(f"{file.name} ends at byte {offset + len(raw)}, within an item; prepare it again")
        return raw

    def read_whole(self, name: str) -> bytes:
        """All bytes of a file of its own; an `OSError` where there is none."""
        if is_remote(name):
            entry = list_remote(name)[0]
            return RemoteFile(entry).range(0, entry.size_bytes or 0)
        with open_regular(Path(name)) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > LARGEST_ITEM_BYTES:
                raise UserError(f"{name} has {size} bytes, more than an item may have; leave it out")
            return stream.read(size)

    def _descriptor(self, file: SourceFile) -> int:
        if file.name in self._local:
            self._local.move_to_end(file.name)
            return self._local[file.name]
        try:
            with open_regular(Path(file.name)) as stream:
                status = os.fstat(stream.fileno())
                descriptor = os.dup(stream.fileno())
        except OSError as error:
            raise UserError(
                f"{file.name} cannot be opened ({error.strerror}), and prepared samples refer to it; put it back or "
                "prepare again"
            ) from error
        self._local[file.name] = descriptor
        if len(self._local) > _OPEN_FILES:
            os.close(self._local.popitem(last=False)[1])
        if file.stamp and (status.st_size, str(status.st_mtime_ns)) != (file.size_bytes, file.stamp):
            raise UserError(
                f"{file.name} changed since its samples were prepared; prepare it again, or put the old file back"
            )
        return descriptor

    def _server(self, file: SourceFile) -> RemoteFile:
        if self._owner != os.getpid():
            self._remote, self._owner = {}, os.getpid()
        if file.name not in self._remote:
            entry = list_remote(file.name)[0]
            if file.stamp and (entry.size_bytes or 0, entry.stamp) != (file.size_bytes, file.stamp):
                raise UserError(f"{file.name} changed since its samples were prepared; prepare it again")
            self._remote[file.name] = RemoteFile(entry)
        return self._remote[file.name]
