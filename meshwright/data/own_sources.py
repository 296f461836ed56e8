"""Sources of users' own: `NAME:ARGUMENT` in data.sources is read once into a JSONL file of the cache, and from there
on like any other."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.data.cache import building, cache_root
from meshwright.errors import UserError
from meshwright.job.data import Data
from meshwright.registries import SOURCES

DOCUMENTS = "documents.jsonl"
_SPELLING = re.compile(r"([a-z][a-z0-9_-]+):(?!//)(.*)", re.DOTALL)


def is_own_source(source: str) -> bool:
    """Whether an entry of data.sources names a source that is registered or installed."""
    found = _SPELLING.fullmatch(source)
    return found is not None and found[1] not in SOURCES.built_in and SOURCES.is_own(found[1])


def with_files(data: Data) -> Data:
    """The data section with the files of its own sources in their place."""
    sources = read_into_files(data.sources, data.text_field, data.cache)
    return data if sources == data.sources else data.model_copy(update={"sources": sources})


def read_into_files(sources: Sequence[str], text_field: str, cache: str | None) -> tuple[str, ...]:
    """The sources, each of users' own as the file its documents were written to, now or before."""
    return tuple(_file_of(source, text_field, cache) if _is_named(source) else source for source in sources)


def _is_named(source: str) -> bool:
    """Whether it is spelled as a source of one's own, and is no file; a name that nobody knows is refused."""
    found = _SPELLING.fullmatch(source)
    if found is None or found[1] in SOURCES.built_in or Path(source).expanduser().exists():
        return False
    try:
        SOURCES.require(found[1])
    except ValueError as error:
        raise UserError(str(error)) from None
    return True


def _file_of(source: str, text_field: str, cache: str | None) -> str:
    name, _, argument = source.partition(":")
    read = SOURCES.find(name)
    identity = json.dumps([name, argument, text_field, _version(read, argument)])
    folder = cache_root(cache) / f"source-{hashlib.sha256(identity.encode()).hexdigest()[:20]}"
    if not _is_complete(folder):
        with building(folder, _is_complete) as draft:
            _write(draft / DOCUMENTS, source, read(argument), text_field)
    return str(folder / DOCUMENTS)


def _version(read: Any, argument: str) -> str:
    """What tells one state of a source from the next: its `version`, else the size and time of the file it reads."""
    version = getattr(read, "version", None)
    if version is not None:
        return str(version(argument) if callable(version) else version)
    path = Path(argument).expanduser()
    if not argument or not path.is_file():
        return ""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _is_complete(folder: Path) -> bool:
    return (folder / DOCUMENTS).is_file()


def _write(path: Path, source: str, documents: Any, text_field: str) -> None:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for count, document in enumerate(documents, start=1):
            if not isinstance(document, str | dict):
                raise UserError(
                    f"data.sources: {source} yields a {type(document).__name__} as document {count}; yield texts, or "
                    "records with their fields as dictionaries"
                )
            record = {text_field: document} if isinstance(document, str) else document
            file.write(json.dumps(record) + "\n")
    if not count:
        raise UserError(f"data.sources: {source} yields no document; correct its argument or leave it out")
