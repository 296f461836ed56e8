"""How the head splits its products: by tokens, so that logits never exist whole, and on a GPU into full lines."""

from math import ceil

CHUNK_LOGITS_BYTES = 2**30
"""Logits that may exist at once: every chunk adds to the whole weight gradient, which for few tokens costs more than
their products."""
CHUNK_MULTIPLE = 128
"""Rows of a matrix product's tile."""
ROW_MULTIPLE = 64
"""Logits in a line of 128 bytes, in 16 bits."""


def chunk_rows(tokens: int, vocabulary: int, number_bytes: int) -> int:
    """Tokens of a chunk: as many as fit in CHUNK_LOGITS_BYTES, the last chunk about as large as the others."""
    most = max(1, CHUNK_LOGITS_BYTES // (vocabulary * number_bytes))
    even = ceil(tokens / ceil(tokens / most))
    return even if even < CHUNK_MULTIPLE else ceil(even / CHUNK_MULTIPLE) * CHUNK_MULTIPLE


def in_whole_lines(vocabulary: int) -> int:
    """Columns of the head's products on a GPU.

    With GPT-2's 50,257 words its three products and its loss take four times as long on an H200.
    """
    return ceil(vocabulary / ROW_MULTIPLE) * ROW_MULTIPLE
