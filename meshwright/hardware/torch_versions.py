"""Which torch releases Meshwright runs on, with a warning past the newest tested, and whether Triton is installed."""

import importlib.util

OLDEST = (2, 11)
NEWEST_TESTED = (2, 15)
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether kernels written in Triton can be compiled; it comes with torch for GPUs, and needs one."""


def too_old(version: str) -> bool:
    """Whether a torch release lacks what Meshwright needs."""
    return _numbers(version) < OLDEST


def untested(version: str) -> str | None:
    """One sentence about a torch release newer than any that was tested; None for the others."""
    if _numbers(version) <= NEWEST_TESTED:
        return None
    newest = ".".join(map(str, NEWEST_TESTED))
    return f"torch {version} is newer than {newest}, the newest release tested; try `meshwright verify JOB` first"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
