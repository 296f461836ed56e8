"""The one exception that means "the user can fix this", and how an error is printed."""

import os
import sys

CONTROL_CHARACTERS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Characters that could command a terminal, for `str.translate`."""


class UserError(Exception):
    """An error the user can fix: one sentence that names what is wrong, its value and the remedy; the CLI exits 2."""


def print_error(text: object) -> None:
    """Print a sentence to standard error; it may quote a stranger's file, and the terminal may be gone."""
    try:
        print(f"meshwright: {text}".translate(CONTROL_CHARACTERS), file=sys.stderr, flush=True)
    except OSError:  # the exit code must still say how the command ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
