"""A file that cannot be read is damaged, whichever of its readers says so."""

import csv
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.data.raw.local import unreadable
from meshwright.errors import UserError


@contextmanager
def damage_named(name: str) -> Iterator[None]:
    """Inside, a file is read: what its readers and the system raise becomes one sentence about it."""
    try:
        yield
    except UserError:
        raise
    except MemoryError as error:
        raise UserError(
            f"{name} holds something that takes more memory to read than there is; leave it out, or write it "
            "again in smaller records"
        ) from error
    except (OSError, EOFError, zlib.error, tarfile.TarError, csv.Error) as error:
        raise unreadable(name, error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "pyarrow":  # the program is at fault, not the file
            raise
        raise unreadable(name, error) from error
