"""What still runs on this machine."""

from pathlib import Path


def left_over(word: str) -> list[str]:
    """Processes with a word in their command line, even when what started them is gone."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in command:
            found.append(command)
    return found
