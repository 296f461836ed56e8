"""Columns of Parquet and Arrow files, a few rows at a time."""

from collections.abc import Iterator
from typing import Any, BinaryIO

from meshwright.data.raw.extras import need
from meshwright.data.raw.inputs import InputFile
from meshwright.errors import UserError

_ROWS = 256


def count_groups(file: InputFile) -> int:
    """Parts a reader can start at: row groups of Parquet, record batches of an Arrow file (1 of a stream)."""
    with file.open() as stream:
        if file.format == "parquet":
            return int(need("pyarrow.parquet", file.name).ParquetFile(stream).metadata.num_row_groups)
        opened = _open_arrow(file, stream)
        return int(getattr(opened, "num_record_batches", 1))


def table_rows(file: InputFile, stream: BinaryIO, start: int, stop: int, field: str) -> Iterator[bytes | None]:
    """The text column's values as bytes, of the groups from start up to stop."""
    if file.format == "parquet":
        yield from _parquet_rows(file, stream, start, stop, field)
        return
    opened = _open_arrow(file, stream)
    _require_text(file, opened.schema, field)
    if hasattr(opened, "num_record_batches"):
        batches: Iterator[Any] = (opened.get_batch(i) for i in range(start, min(stop, opened.num_record_batches)))
    else:
        batches = iter(opened)
    for batch in batches:
        yield from _values(batch.column(batch.schema.get_field_index(field)))


def _parquet_rows(file: InputFile, stream: BinaryIO, start: int, stop: int, field: str) -> Iterator[bytes | None]:
    parquet = need("pyarrow.parquet", file.name)
    # A buffer bounds what is held of a row group, whose columns would otherwise be read whole.
    opened = parquet.ParquetFile(stream, buffer_size=1 << 20)
    _require_text(file, opened.schema_arrow, field)
    groups = range(start, min(stop, opened.metadata.num_row_groups))
    for batch in opened.iter_batches(_ROWS, row_groups=list(groups), columns=[field], use_threads=False):
        yield from _values(batch.column(0))


def _open_arrow(file: InputFile, stream: BinaryIO) -> Any:
    pyarrow = need("pyarrow", file.name)
    try:
        return pyarrow.ipc.open_file(stream)
    except pyarrow.ArrowInvalid:
        stream.seek(0)
        return pyarrow.ipc.open_stream(stream)  # what Hugging Face datasets write


def _require_text(file: InputFile, schema: Any, field: str) -> None:
    import pyarrow as pa

    if schema.names.count(field) != 1:
        raise UserError(
            f'{file.name} has no column "{field}" (only {", ".join(schema.names[:5])}); set --text-field to the one '
            "that holds the text"
        )
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(
            f'{file.name} has a column "{field}" of {kind} where text is needed; set --text-field to the one that '
            "holds the text"
        )


def _values(column: Any) -> Iterator[bytes | None]:
    """As bytes, since a writer may have put anything into a column of text."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for first in range(0, len(column), _ROWS):
        yield from column.slice(first, _ROWS).cast(pa.large_binary()).to_pylist()
