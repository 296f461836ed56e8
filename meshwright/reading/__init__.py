"""The only way to read files that others may have written into a run folder: every reader goes through here.

Size, depth, numbers and types are bounded before anything is built from them, links and pipes are not read, and a line
that is invalid costs only that line.
"""

from meshwright.reading.bounded import (
    FILE_BYTES,
    Unfit,
    open_plain,
    parse_json,
    printable,
    read_object,
    read_plain,
    read_text,
)
from meshwright.reading.kinds import ATTEMPTS, EVENTS, MEMORY, METRICS, REHEARSAL, is_number
from meshwright.reading.rows import Kind, Row, Tally, batches_of, kept_rows, rows_in, stream_rows

__all__ = [
    "ATTEMPTS",
    "EVENTS",
    "FILE_BYTES",
    "MEMORY",
    "METRICS",
    "REHEARSAL",
    "Kind",
    "Row",
    "Tally",
    "Unfit",
    "batches_of",
    "is_number",
    "kept_rows",
    "open_plain",
    "parse_json",
    "printable",
    "read_object",
    "read_plain",
    "read_text",
    "rows_in",
    "stream_rows",
]
