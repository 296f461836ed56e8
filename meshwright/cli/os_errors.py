"""What the operating system refuses: paths the user gave (too long, unreadable, not a folder), memory and threads.

Libraries abort the process where an allocation fails, so a small limit is refused before they are loaded.
"""

import errno
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import UserError

_FULL, _CLOSED = (errno.ENOSPC, errno.EDQUOT), (errno.EACCES, errno.EPERM, errno.EROFS)
_REMEDIES = dict.fromkeys(_FULL, "free some space") | dict.fromkeys(_CLOSED, "check its permissions")
_THE_MACHINE_S = (*_FULL, *_CLOSED, errno.ENAMETOOLONG, errno.ELOOP)
"""No program can fix these: the user must change a disk, a permission or a path."""
_OF_A_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL, errno.ENXIO)
"""A user error if the user gave the path; an internal error if the path is ours."""
LEAST_ADDRESS_SPACE_GIB, LEAST_ADDRESS_SPACE_OF_TORCH_GIB = 1, 4
"""`job explain` maps 0.7 GiB and the demo's training 1.6 GiB, on two cores; every further core adds its threads."""


def require_utf8() -> None:
    """Reject a process that would decode file names and print with another encoding."""
    for encoding in (sys.getfilesystemencoding(), getattr(sys.stdout, "encoding", None)):
        if encoding is not None and encoding.lower().replace("-", "") != "utf8":
            raise UserError(
                f"Python's encoding for files and output is {encoding} here, which cannot write every name and text; "
                "set PYTHONUTF8=1 and leave PYTHONIOENCODING unset"
            )


def require_address_space(runs_torch: bool) -> None:
    """Reject a limit of the shell under which the command could not even load its libraries."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    least_gib = LEAST_ADDRESS_SPACE_OF_TORCH_GIB if runs_torch else LEAST_ADDRESS_SPACE_GIB
    if limit != resource.RLIM_INFINITY and limit < least_gib * 2**30:
        raise UserError(
            f"ulimit -v = {limit // 1024} allows {limit / 2**30:.1f} GiB of address space, and the libraries of this "
            f"command may abort with less than {least_gib} GiB; raise it, or set ulimit -v unlimited"
        )


def require_text(arguments: Sequence[str]) -> None:
    """Reject arguments that no file, field or script can accept."""
    for argument in arguments:
        if "\0" in argument or any("\ud800" <= character <= "\udfff" for character in argument):
            raise UserError(f"{_shown(argument)} is not valid UTF-8; write the argument, or rename the file, in UTF-8")


@contextmanager
def refusals_of_the_system(arguments: Sequence[str]) -> Iterator[None]:
    """Turn an OS error about a path that the user gave, and a lack of memory or threads, into one sentence; any other
    is an internal error."""
    try:
        yield
    except MemoryError as error:
        raise _no_memory(str(error)) from error
    except RuntimeError as error:
        text = str(error)
        if "DefaultCPUAllocator: can't allocate memory" in text:  # torch's own; on a GPU it has a class
            raise _no_memory(text.partition("memory: ")[2]) from error
        if "can't start new thread" not in text:
            raise
        raise UserError(
            "this process can start no further thread; raise ulimit -u and the limit of processes of the container"
        ) from error
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:
            raise
        name = "the disk" if error.filename is None else os.fsdecode(error.filename)
        if error.errno in _THE_MACHINE_S or (error.errno in _OF_A_PATH and _given(name, arguments)):
            remedy = _REMEDIES.get(error.errno, "give another path")
            raise UserError(f"{_shown(name)}: {error.strerror}; {remedy}") from error
        raise


def _no_memory(detail: str) -> UserError:
    detail = f" ({detail})" if detail else ""
    remedy = "choose a smaller job, end other programs, or raise ulimit -v and the limit of the container"
    return UserError(f"this process can get no more memory{detail}; {remedy}")


def _given(path: str, arguments: Sequence[str]) -> bool:
    """Whether the path is an argument, or the value of an option or field, or lies under one that is a file."""
    values = {value for argument in arguments for value in (argument, argument.partition("=")[2].strip("\"'"))}
    given = {Path(value).absolute() for value in values if value}
    found = Path(path).absolute()
    return found in given or any(parent in given and not parent.is_dir() for parent in found.parents)


def _shown(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    return text if len(text) <= 80 else f"{text[:77]}..."
