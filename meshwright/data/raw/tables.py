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
    for batch in opened.iter_batches(_ROWS, row_groups=list(groups), columns=names, use_threads=False):
        yield from _values(batch, taking)


def _require_likely_sizes(file: InputFile, metadata: Any, groups: range) -> None:
    """Refuse, before it is unpacked, what by its own account is out of all proportion to the file."""
    for number in groups:
        group = metadata.row_group(number)
        if group.total_byte_size > max(JUDGED_FROM_BYTES, LARGEST_RATIO * file.size_bytes):
            raise out_of_proportion(file.name, f"its row group {number} has {group.total_byte_size:,} bytes")


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
    for first in range(0, batch.num_rows, _ROWS):
        for row in batch.slice(first, _ROWS).to_pylist():
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
