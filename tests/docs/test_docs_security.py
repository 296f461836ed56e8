"""The numbers of the security page are those of the code, and every row names tests that exist."""

import re

import pytest
from docs_pages import ROOT

from meshwright.checkpoint import backup_thread, reading, store
from meshwright.data import chat, limits, lines, tokenizer_limits
from meshwright.data.media import container
from meshwright.data.raw import packed
from meshwright.job import reading as settings
from meshwright.job import section
from meshwright.reading import bounded, rows
from meshwright.studio import limits as studio
from meshwright.studio import runs

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
ROWS = {
    name: (protection, tests)
    for name, protection, tests in re.findall(r"^\| (.+?) \| (.+) \| (.+?) \|$", PAGE, re.MULTILINE)
    if name != "input"
}
KIB, MIB, GIB = 2**10, 2**20, 2**30
NUMBERS = [
    ("Run folders and checkpoints", f"at most {bounded.FILE_BYTES // MIB} MiB per small file"),
    ("Run folders and checkpoints", f"{rows.LONGEST_LINE // MIB} MiB per small file or line"),
    ("Run folders and checkpoints", f"{bounded.DEEPEST} levels of nesting"),
    ("Run folders and checkpoints", f"at most {reading.RECORD_BYTES // MIB} MiB, their shards"),
    ("Chat templates", f"{chat.SECONDS:.0f} s and {chat.MEMORY_BYTES // GIB} GiB per conversation"),
    ("Chat templates", f"{lines.LONGEST_RECORD_BYTES // MIB} Mi characters"),
    ("Tokenizers", f"at most {tokenizer_limits.LARGEST_GROWTH} times as long"),
    ("Tokenizers", f"longer than {tokenizer_limits.NORMALIZED_BYTES // MIB} MiB"),
    ("Tokenizers", f"at most {tokenizer_limits.NORMALIZED_RATIO} times;"),
    ("Tokenizers", f"{tokenizer_limits.CALL_S:.0f} s for each call"),
    ("Tokenizers", f"{4_000_000 // tokenizer_limits.CALL_BYTES_PER_S} s for each million characters"),
    ("Data files", f"records up to {lines.LONGEST_RECORD_BYTES // MIB} MiB"),
    ("Data files", f"up to {packed.LARGEST_RATIO} : 1"),
    ("Data files", f"{limits.READER_BYTES // GIB} GiB more memory"),
    ("Pictures, film and sound", f"{container._FIRST_SECONDS:.0f} s of a processor"),
    ("Pictures, film and sound", f"{container._SECONDS_PER_MIB:.0f} s more per MiB"),
    ("Settings files", f"{settings._LARGEST // MIB} MiB, as TOML {settings._LARGEST_TOML // KIB} Ki characters"),
    ("Settings files", f"{settings._DEEPEST_KEY} names in a key"),
    ("Settings files", f"strings of {section._LONGEST} bytes"),
    ("Object stores for backups", f"({store.ANSWER_S:.0f} s, and {store.STALLED_S:.0f} s without a byte"),
    ("Object stores for backups", f"every {backup_thread.LEAST_BYTES_PER_S // MIB} MiB"),
    ("The studio's clients", f"{studio.CONNECTIONS} connections, {studio.REQUEST_S:.0f} s per request"),
    ("The studio's clients", f"{studio.HEADER_BYTES // KIB} KiB of headers"),
    ("The studio's clients", f"{studio.WRONG_TOKENS} wrong tokens per minute"),
    ("The studio's clients", f"`notes.txt` ({runs._NOTE_BYTES // KIB} KiB of text"),
]


@pytest.mark.parametrize(("row", "claim"), NUMBERS)
def test_a_number_is_that_of_the_code(row: str, claim: str) -> None:
    assert claim in ROWS[row][0]


def test_the_waits_written_as_words() -> None:
    assert (backup_thread.LAST_S, studio.EVERY_S) == (120.0, 60.0)
    assert "the end of a run for two minutes" in ROWS["Object stores for backups"][0]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_the_tests_that_hold_it(row: str) -> None:
    files = re.findall(r"`(tests/[\w/]+\.py)`", ROWS[row][1])
    assert files and all("\ndef test_" in (ROOT / file).read_text(encoding="utf-8") for file in files)
