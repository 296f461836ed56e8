"""Pictures, film and sound that cannot be used: what is wrong with them, in words and in kinds that are counted."""

from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.errors import UserError

NO_BYTES, UNKNOWN, DAMAGED, TOO_LARGE = "of no bytes", "of unknown content", "damaged", "too large"
TOO_SLOW = "too slow to decode"


class Damaged(Exception):
    """What is wrong with an item: a kind to count it under, and the rest of a sentence."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@contextmanager
def decoding() -> Iterator[None]:
    """Inside, a decoder reads a file of others, and may raise anything: whatever it is, the file is damaged."""
    try:
        yield
    except (Damaged, UserError):
        raise
    except MemoryError as error:
        raise Damaged(TOO_LARGE, "takes more memory than there is") from error
    except Exception as error:
        said = getattr(error, "strerror", None) or str(error)  # FFmpeg's errors name a file that is none
        why = (said.strip().splitlines() or [type(error).__name__])[0]
        raise Damaged(DAMAGED, why[:120]) from error
