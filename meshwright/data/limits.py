"""A bound on the memory of a process that reads files of others."""

import resource
import sys
from pathlib import Path

READER_BYTES = 4 << 30
"""More than any document takes; a file that needs more to be read was made to do harm, or is damaged."""


def bound_memory(more_bytes: int = READER_BYTES) -> None:
    """From now on, what would take so much more memory than this process holds fails here, and the machine goes on."""
    if sys.platform != "linux":
        return
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    held = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    given = [held + more_bytes, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(given), hard))
