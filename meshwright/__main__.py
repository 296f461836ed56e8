"""The program: the installed command, and `python -m meshwright` from PYTHONPATH where nothing can be installed."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path and "PYTHONSAFEPATH" not in os.environ:
    del sys.path[0]  # `python -m` put the working directory there; PYTHONPATH may still name it

import gc
import multiprocessing

from meshwright.cli import main
from meshwright.ranks import end_rank


def run() -> None:
    """The command line in a process of its own."""
    gc.set_threshold(50_000)  # imports create many objects and hardly any garbage
    os.environ["PYTHONSAFEPATH"] = "1"  # for Python processes that libraries start
    code = None
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    finally:
        gc.freeze()  # or Python would look for garbage in all of them, more than once, before it exits
    if "RANK" in os.environ and multiprocessing.parent_process() is None and not isinstance(code, str):
        end_rank(code or 0)  # a fork ends without Python's exit anyway
    sys.exit(code)


if __name__ == "__main__":
    run()
