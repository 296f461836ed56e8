"""Columns of Parquet and Arrow files, a few rows at a time: texts as bytes, or records where more is needed."""

from collections.abc import Iterator
from typing import Any, BinaryIO

from meshwright.data.raw.damage import damage_named
from meshwright.data.raw.extras import need
from meshwright.data.raw.inputs import InputFile
from meshwright.data.raw.items import Taking
from meshwright.data.raw.packed import JUDGED_FROM_BYTES, LARGEST_RATIO, out_of_proportion
from meshwright.errors import UserError

_ROWS = 64
_BATCH_BYTES = 64 << 20
"""Of the values that rows of one batch may repeat from a dictionary."""
Row = bytes | dict[str, Any] | None
"""The text, or the fields that have a value."""


def count_groups(file: InputFile) -> int:
    """Parts a reader can start at: row groups of Parquet, record batches of an Arrow file (1 of a stream)."""
    with damage_named(file.name), file.open() as stream:
        if file.format == "parquet":
            return int(need("pyarrow.parquet", file.name).ParquetFile(stream).metadata.num_row_groups)
        opened = _open_arrow(file, stream)
        return int(getattr(opened, "num_record_batches", 1))


def table_rows(file: InputFile, stream: BinaryIO, start: int, stop: int, taking: Taking) -> Iterator[Row]:
    """What is taken from the rows of the groups from start up to stop."""
    decoded = _DecodedBytes(file)
    for row in _rows(file, stream, start, stop, taking):
        decoded.add(row)
        yield row


def _rows(file: InputFile, stream: BinaryIO, start: int, stop: int, taking: Taking) -> Iterator[Row]:
    if file.format == "parquet":
        yield from _parquet_rows(file, stream, start, stop, taking)
        return
    opened = _open_arrow(file, stream)
    names = _columns(file, opened.schema, taking)
    if hasattr(opened, "num_record_batches"):
        batches: Iterator[Any] = (opened.get_batch(i) for i in range(start, min(stop, opened.num_record_batches)))
    else:
        batches = iter(opened)
    for batch in batches:
        yield from _values(batch.select(names), taking)


def _parquet_rows(file: InputFile, stream: BinaryIO, start: int, stop: int, taking: Taking) -> Iterator[Row]:
    parquet = need("pyarrow.parquet", file.name)
    # A buffer bounds what is held of a row group, whose columns would otherwise be read whole.
    opened = parquet.ParquetFile(stream, buffer_size=1 << 20)
    names = _columns(file, opened.schema_arrow, taking)
    groups = range(start, min(stop, opened.metadata.num_row_groups))
    _require_likely_sizes(file, opened.metadata, groups)
    columns = [opened.metadata.schema.column(number) for number in range(len(opened.metadata.schema))]
    texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    unexpanded = parquet.ParquetFile(stream, buffer_size=1 << 20, read_dictionary=texts)
    for group in groups:
        how = {"row_groups": [group], "columns": names, "use_threads": False}
        # A first row that refers to its values' dictionaries brings them whole, and so tells how large they are.
        first = next(unexpanded.iter_batches(1, **how), None)
        rows = _ROWS if first is None else max(1, min(_ROWS, _BATCH_BYTES // max(1, first.nbytes)))
        for batch in opened.iter_batches(rows, **how):
            yield from _values(batch, taking)


def _require_likely_sizes(file: InputFile, metadata: Any, groups: range) -> None:
    """Refuse, before it is unpacked, what by its own account is out of all proportion to the file."""
    for number in groups:
        group = metadata.row_group(number)
        if group.total_byte_size > max(JUDGED_FROM_BYTES, LARGEST_RATIO * file.size_bytes):
            raise out_of_proportion(file.name, f"its row group {number} has {group.total_byte_size:,} bytes")


class _DecodedBytes:
    """Counts what the rows of a file stand for: a dictionary of a few bytes can stand for any number of long values."""

    def __init__(self, file: InputFile) -> None:
        self._name, self._count = file.name, 0
        # A server may not say how large a file is.
        self._most = max(JUDGED_FROM_BYTES, LARGEST_RATIO * file.size_bytes) if file.size_bytes else 1 << 62

    def add(self, row: Row) -> None:
        """Count a row; refuse the file once its rows are out of all proportion to it."""
        self._count += _size_of(row)
        if self._count > self._most:
            raise out_of_proportion(self._name, f"its first rows to {self._count:,} bytes")


def _size_of(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value) + 1
    if isinstance(value, dict):
        return 1 + sum(map(_size_of, value.values()))
    return 1 + sum(map(_size_of, value)) if isinstance(value, list) else 1


def _open_arrow(file: InputFile, stream: BinaryIO) -> Any:
    pyarrow = need("pyarrow", file.name)
    try:
        return pyarrow.ipc.open_file(stream)
    except pyarrow.ArrowInvalid:
        stream.seek(0)
        return pyarrow.ipc.open_stream(stream)  # what Hugging Face datasets write


def _columns(file: InputFile, schema: Any, taking: Taking) -> list[str]:
    """The columns to read; the text's must be there, and of a conversation whatever there is of its shapes."""
    more = [name for name in taking.optional if name in schema.names]
    if taking.chat is not None:
        return [*(name for name in taking.fields if name in schema.names), *more]
    _require_text(file, schema, taking.text_field)
    if taking.key_field is not None and taking.key_field not in schema.names:
        raise UserError(
            f'{file.name} has no column "{taking.key_field}" (only {", ".join(schema.names[:5])}); set '
            "data.join (--join) to the right one"
        )
    return [*taking.fields, *more]


def _require_text(file: InputFile, schema: Any, field: str) -> None:
    import pyarrow as pa

    if schema.names.count(field) != 1:
        raise UserError(
            f'{file.name} has no column "{field}" (only {", ".join(schema.names[:5])}); set '
            "data.text_field (--text-field) to the right one"
        )
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(
            f'{file.name} has a column "{field}" of {kind} where text is needed; set '
            "data.text_field (--text-field) to the right one"
        )


def _values(batch: Any, taking: Taking) -> Iterator[Row]:
    """A text alone as bytes, since a writer may have put anything into a column of text."""
    if taking.plain:
        yield from _texts(batch.column(0))
        return
    batch.validate(full=True)
    rows = 1 if "dictionary<" in str(batch.schema) else _ROWS
    for first in range(0, batch.num_rows, rows):
        for row in batch.slice(first, rows).to_pylist():
            yield {name: value for name, value in row.items() if value is not None}


def _texts(column: Any) -> Iterator[bytes | None]:
    """The values of a column of text; what a file says of where they lie is checked before anything is read there."""
    import pyarrow as pa

    column.validate()
    if pa.types.is_dictionary(column.type):
        # Decoded as a whole, one long value that all rows share would be held for every row.
        column.indices.validate(full=True)
        texts = _as_bytes(column.dictionary)
        for index in column.indices.to_pylist():
            if index is not None and not 0 <= index < len(texts):
                raise pa.ArrowInvalid(f"a row has entry {index} of a dictionary of {len(texts)}")
            yield None if index is None else texts[index].as_py()
        return
    for value in _as_bytes(column):
        yield value.as_py()


def _as_bytes(column: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_string_view(column.type):
        column.validate(full=True)
        return column.cast(pa.large_binary())
    found = column.view(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
    found.validate(full=True)
    return found
