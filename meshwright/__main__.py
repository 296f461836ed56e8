"""The program: the installed command, and `python -m meshwright` from PYTHONPATH where nothing can be installed."""

import gc

from meshwright.cli import main


def run() -> None:
    """The command line in a process of its own."""
    gc.set_threshold(50_000)  # imports create many objects and hardly any garbage
    try:
        main()
    finally:
        gc.freeze()  # or Python would look for garbage in all of them, more than once, before it exits


if __name__ == "__main__":
    run()
