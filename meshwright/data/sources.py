"""Documents out of files: text, JSONL, folders of either, and the standard library of this Python."""

import codecs
import io
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.chat import ChatTemplate, Overran
from meshwright.data.conversations import BadConversation, conversation_of
from meshwright.data.files import is_regular_inside, open_regular
from meshwright.data.lines import LONGEST_RECORD_BYTES, lines_of
from meshwright.data.tokenizer import Spans
from meshwright.errors import UserError

STDLIB = "builtin:stdlib"
SYNTHETIC = "builtin:synthetic"

TEXT_SUFFIXES = frozenset(
    f".{name}"
    for name in (
        *("txt", "text", "md", "markdown", "rst", "tex", "html", "htm", "xml", "csv", "tsv", "toml", "yaml", "yml"),
        *("py", "pyi", "ipynb", "c", "h", "cc", "cpp", "hpp", "cu", "rs", "go", "js", "ts", "java", "kt", "scala"),
        *("rb", "php", "sh", "sql", "lua", "jl", "r", "swift", "hs", "ml"),
    )
)
JSONL_SUFFIX = ".jsonl"
_NOT_STDLIB = frozenset({"site-packages", "dist-packages"})
# A longer text file is handed on in pieces, so that memory does not grow with the file.
PIECE_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 18


@dataclass(frozen=True)
class SourceFile:
    """One file to read, as it was when listed."""

    path: Path
    size_bytes: int
    modified_ns: int
    skip_if_not_utf8: bool = False


@dataclass(frozen=True)
class Source:
    """One entry of data.sources and the files it stands for."""

    name: str
    files: tuple[SourceFile, ...]

    @property
    def size_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class Document:
    """A document, or a piece of a long one: the text, its file (and line), and the bytes it took up there."""

    text: str
    origin: str
    source_bytes: int
    last_piece: bool = True
    marks: Spans | None = None
    """The parts of the text that the loss counts; None where it counts all."""


def list_sources(names: Sequence[str]) -> list[Source]:
    """The sources with every file they stand for, folders and the standard library unfolded, in a fixed order."""
    return [Source(name, tuple(_files_of(name))) for name in names]


def iterate_documents(
    sources: Sequence[Source], text_field: str, chat: ChatTemplate | None = None
) -> Iterator[Document]:
    """The documents of the sources in order, read as they are asked for; those of only white space are left out.

    With a chat template every line is a conversation.
    """
    for source in sources:
        empty = True
        for file in source.files:
            try:
                for document in _documents_of(file, text_field) if chat is None else _conversations(file.path, chat):
                    empty = False
                    yield document
            except OSError as error:
                raise _unreadable(file.path, error) from error
        if empty:
            raise UserError(f"data.sources: {source.name} holds no text; put some there or remove it from the list")


def iterate_keyed(source: Source, text_field: str, key_field: str) -> Iterator[tuple[str, Document]]:
    """The documents of a source of JSONL files, each with the key in another of its fields."""
    for file in source.files:
        if file.path.suffix.lower() != JSONL_SUFFIX:
            raise UserError(
                f"data.join joins {JSONL_SUFFIX} files, not {file.path}; write a document with its key a line"
            )
        for origin, line in _lines(file.path):
            text = _text_of_line(file.path, origin, line, text_field)
            key = _record_of_line(file.path, origin, line).get(key_field)
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise UserError(
                    f'data.sources: {origin} has no text or whole number in its field "{key_field}" to join it by; '
                    "correct data.join, or mend the line"
                )
            yield str(key), Document(text, origin, len(line))


def _files_of(source: str) -> Iterator[SourceFile]:
    if source == STDLIB:
        yield from _stdlib_files()
        return
    if source.startswith("builtin:"):
        raise UserError(f'data.sources names "{source}", which does not exist; choose {STDLIB} or {SYNTHETIC}')
    path = Path(source).expanduser().resolve()
    if path.is_dir():
        paths = [p for p in walk(path) if p.suffix.lower() in TEXT_SUFFIXES or p.suffix.lower() == JSONL_SUFFIX]
        if not paths:
            raise UserError(f"data.sources: the folder {path} holds no text or {JSONL_SUFFIX} files; name another")
        yield from map(_listed, regular_inside(paths, path))
    elif path.is_file():
        yield _listed(path)
    else:
        raise UserError(f"data.sources: {path} does not exist or is not a file or folder; correct the path")


def _stdlib_files() -> Iterator[SourceFile]:
    root = Path(sysconfig.get_path("stdlib")).resolve()
    # Some systems link files of their own into it.
    paths = [p for p in walk(root, leave_out=_NOT_STDLIB) if p.suffix == ".py" and not p.is_symlink()]
    if not paths:
        raise UserError(f"data.sources: {STDLIB} finds no Python source under {root}; name your own text files")
    for path in paths:
        yield _listed(path, skip_if_not_utf8=True)


def walk(folder: Path, leave_out: frozenset[str] = frozenset()) -> list[Path]:
    """The visible files below a folder, sorted; links to folders are not followed, since they may form loops."""
    paths = []
    for parent, folders, names in os.walk(folder, onerror=_refuse_folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in leave_out]
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(paths)


def regular_inside(paths: list[Path], folder: Path) -> list[Path]:
    """The paths below a folder, each refused by name unless it is a regular file that lies there itself."""
    for path in paths:
        try:
            if is_regular_inside(path, folder):
                continue
        except OSError as error:
            raise _unreadable(path, error) from error
        what = f"leads out of {folder}, to {path.resolve()}" if path.is_symlink() else "is a pipe, a socket or a device"
        raise UserError(
            f"data.sources: {path} {what}, and only regular files inside a folder are read; remove it, or name the "
            "file itself as a source"
        )
    return paths


def _refuse_folder(error: OSError) -> None:
    raise _unreadable(error.filename, error) from error


def _listed(path: Path, skip_if_not_utf8: bool = False) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return SourceFile(path, status.st_size, status.st_mtime_ns, skip_if_not_utf8)


def _documents_of(file: SourceFile, text_field: str) -> Iterator[Document]:
    if file.path.suffix.lower() == JSONL_SUFFIX:
        yield from _jsonl_documents(file.path, text_field)
    elif not file.skip_if_not_utf8 or _is_utf8(file.path):
        yield from _text_document(file.path)


def _is_utf8(path: Path) -> bool:
    try:
        _open(path).read().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _text_document(path: Path) -> Iterator[Document]:
    """One file's text as one document, in pieces when it is long."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held = ""
    started = False
    consumed = reported = 0
    with _open(path) as stream:
        while chunk := stream.read(PIECE_BYTES):
            try:
                held += decoder.decode(chunk)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, str(path), error) from error
            consumed += len(chunk)
            if len(held) < PIECE_BYTES:
                continue
            cut = _cut(held)
            if started or not held[:cut].isspace():
                yield Document(held[:cut], str(path), consumed - reported, last_piece=False)
                started, reported = True, consumed
            # A file of white space alone is no document, and a piece of nothing else before a text no part of one.
            held = held[cut:]
    try:
        held += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, str(path), error) from error
    if started or held.strip():
        yield Document(held, str(path), consumed - reported)


def _cut(text: str) -> int:
    """Where to end a piece: behind its last full line, else before its last space; something always stays behind."""
    line_end = text.rfind("\n", 0, len(text) - 1) + 1
    return line_end or max(text.rfind(" "), 0) or len(text) - 1


def _jsonl_documents(path: Path, text_field: str) -> Iterator[Document]:
    for origin, line in _lines(path):
        text = _text_of_line(path, origin, line, text_field)
        if text.strip():
            yield Document(text, origin, len(line))


def _conversations(path: Path, chat: ChatTemplate) -> Iterator[Document]:
    if path.suffix.lower() != JSONL_SUFFIX:
        raise UserError(
            f'data.format = "conversations" reads {JSONL_SUFFIX} files, not {path}; write a conversation a line'
        )
    for origin, line in _lines(path):
        try:
            text, marks = chat.render(conversation_of(_record_of_line(path, origin, line)))
        except Overran as error:
            raise UserError(f"data.sources: {origin} {error}") from error
        except BadConversation as error:
            raise UserError(f"data.sources: {origin} {error}; mend or remove that line") from error
        yield Document(_without_surrogates(text, origin), origin, len(line), marks=marks)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines that hold something, each with its place for errors."""
    with _open(path) as stream:
        for line in lines_of(stream):
            origin = f"{path}:{line.number}"
            if line.raw is None:
                raise UserError(
                    f"data.sources: {origin}, from byte {line.place} on, is a line of more than "
                    f"{LONGEST_RECORD_BYTES >> 20} MiB; make several of it, or remove it"
                )
            yield origin, line.raw


def _open(path: Path) -> io.BufferedReader:
    try:
        return io.BufferedReader(open_regular(path), _BUFFER_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error


def _record_of_line(path: Path, origin: str, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig").strip())
    except UnicodeDecodeError as error:
        raise _not_utf8(path, origin, error) from error
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise UserError(f"data.sources: {origin} is not JSON ({reason}); mend or remove that line") from error


def _text_of_line(path: Path, origin: str, line: bytes, text_field: str) -> str:
    record = _record_of_line(path, origin, line)
    if not isinstance(record, dict) or text_field not in record:
        keys = "only " + ", ".join(list(record)[:5]) if isinstance(record, dict) and record else "no fields at all"
        raise UserError(
            f'data.sources: {origin} has no field "{text_field}" ({keys}); set data.text_field to the one that holds '
            "the text, or mend the line"
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise UserError(
            f'data.sources: {origin} has a {type(text).__name__} in its field "{text_field}" where text is needed; '
            "set data.text_field to the one that holds the text, or mend the line"
        )
    return _without_surrogates(text, origin)


def _without_surrogates(text: str, origin: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"data.sources: {origin} holds half of a surrogate pair ({error.object[error.start]!a}), which is no "
            "character; mend or remove that line"
        ) from error
    return text


def _unreadable(path: Path | str, error: OSError) -> UserError:
    return UserError(f"data.sources: {path} cannot be read ({error.strerror}); mend or remove it")


def _not_utf8(path: Path, origin: str, error: UnicodeDecodeError) -> UserError:
    bad = error.object[error.start]
    return UserError(
        f"data.sources: {origin} is not UTF-8 text (byte 0x{bad:02x}); convert {path.name} to UTF-8 or leave it out"
    )
