"""`python -m meshwright.launch.ray.child PARENT ARGUMENTS`: the command line, ended at once when its parent ends.

When a machine's raylet dies, its actors end; what they have started must not run on beside the next attempt.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Bind this process to its parent, then run the command line."""
    parent = int(sys.argv.pop(1))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        sys.exit(1)
    runpy.run_module("meshwright", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
