"""The text of a check: synthetic documents so unequal that no two ranks count the same number of tokens."""

import json
from itertools import pairwise

import fsspec
import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers

from meshwright.data import Corpus, MemoryTokens, Slots, Tokenizer
from meshwright.data.raw import list_inputs, plan_units
from meshwright.data.streaming import Flow
from meshwright.job import Job

TOKENS = 4096
LEAST_SOURCE = 512
"""Tokens of each source where there are many."""
LONGEST = 40
SEED = 11
"""With this, no two ranks of the matrix's layouts count the same number of valid tokens in a step."""
STREAMED_FILES = 4
HELD_OUT = 3
"""Held-out sequences: an odd number, so that the last batch of an evaluation is short."""


class UnequalDocuments:
    """A short token store in memory; document lengths run from 3 to LONGEST, short and long ones in clusters.

    A document's last token has no label and its first sees nothing but itself, so only lengths from 3 on exercise
    attention. Where the loss counts only some tokens (`learn_some`), no two documents have the same share of them.
    """

    def __init__(self, vocab_size: int, count: int, seed: int, learn_some: bool = False) -> None:
        generator = np.random.default_rng(seed)
        self._tokens = generator.integers(0, vocab_size, count)
        starts = [0]
        while starts[-1] < count:
            # Neighbours are alike, so that one sequence has a boundary every few tokens and the next has none.
            longest = int(generator.choice((4, 10, LONGEST)))
            lengths = generator.integers(longest // 2 + 1, longest + 1, size=LONGEST // longest)
            starts += (starts[-1] + lengths.cumsum()).tolist()
        self._starts = np.array([start for start in starts if start < count], dtype=np.int64)
        self._learned = generator.random(count) < 0.6 if learn_some else None
        if self._learned is not None:
            self._learned[self._starts[1:] - 1] = True  # a document's last token: its prediction sees all others

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens from start up to stop."""
        return self._tokens[start:stop].astype(np.int64)

    def starts_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where documents start, start included and stop not."""
        first, last = np.searchsorted(self._starts, (start, stop))
        return self._starts[first:last]

    def targets(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Which tokens count in the loss; None for all of them."""
        return None if self._learned is None else self._learned[start:stop]

    def parts(self, count: int) -> tuple[int, ...]:
        """Where sources of about equal size start, each with a document, and where the last ends."""
        inner = self._starts[np.arange(1, count) * len(self._starts) // count]
        return (0, *inner.tolist(), len(self))


class UnequalPairs(UnequalDocuments):
    """Documents of 3 tokens and more, every two of them a pair that fits into a sequence; some tokens are learned."""

    def __init__(self, vocab_size: int, count: int, seed: int, sequence_length: int) -> None:
        generator = np.random.default_rng(seed)
        lengths = generator.integers(3, sequence_length // 2 + 1, count // 3)
        pairs = int(np.searchsorted(lengths.cumsum(), count)) // 2
        ends = lengths[: 2 * pairs].cumsum()
        self._starts = np.append(0, ends[:-1])
        self._tokens = generator.integers(0, vocab_size, ends[-1])
        self._learned = generator.random(len(self._tokens)) < 0.6
        self._learned[ends - 1] = True

    def parts(self, count: int) -> tuple[int, ...]:
        """Where sources of about equal size start, each with a pair, and where the last ends."""
        inner = self._starts[::2][np.arange(1, count) * (len(self._starts) // 2) // count]
        return (0, *inner.tolist(), len(self))


def unequal_corpus(job: Job) -> Corpus:
    """A corpus of such documents at the job's sizes, training and held-out text apart, with as many sources."""
    vocabulary, held_out = job.model.vocab_size, HELD_OUT * job.batch.sequence_length + 1
    if job.data.stream:
        validation = UnequalDocuments(vocabulary, held_out, SEED + 1)
        return Corpus(None, MemoryTokens([], []), validation, None, flow=_flow(job))
    sources, learn_some = len(job.data.sources), job.data.format == "conversations"
    sizes = (max(TOKENS, sources * LEAST_SOURCE), held_out)
    train, validation = (
        UnequalPairs(vocabulary, size, seed, job.batch.sequence_length)
        if job.prefers
        else UnequalDocuments(vocabulary, size, seed, learn_some)
        for seed, size in enumerate(sizes, SEED)
    )
    encoder = job.model.encoder
    slots = None if encoder is None else Slots.of(encoder)
    return Corpus(None, train, validation, None, train.parts(sources) if sources > 1 else (), noise=slots)


def _flow(job: Job) -> Flow:
    """The same documents as JSONL files in this process's memory, in which a token is a number."""
    documents = UnequalDocuments(job.model.vocab_size - 1, TOKENS, SEED)
    bounds = [*documents.starts_between(0, TOKENS).tolist(), TOKENS]
    texts = [" ".join(map(str, documents.read(start, stop))) for start, stop in pairwise(bounds)]
    system = fsspec.filesystem("memory")
    for number in range(STREAMED_FILES):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[number::STREAMED_FILES])
        system.pipe_file(f"/meshwright-verify/{number}.jsonl", lines.encode())
    inputs = list_inputs(["memory://meshwright-verify"])
    words = models.WordLevel({str(token): token for token in range(job.model.vocab_size)}, unk_token="0")
    inner = tokenizers.Tokenizer(words)
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Flow(
        units=tuple(plan_units(inputs.files, max(file.size_bytes for file in inputs.files))),
        shards=min(job.data.virtual_shards, STREAMED_FILES),
        tokenizer=Tokenizer(inner, end_of_text=job.model.vocab_size - 1),
        text_field="text",
        validation_fraction=0.0,
        shuffle_buffer=job.data.shuffle_buffer,
        mask_documents=job.data.mask_documents,
        identity="",
        notes=(),
        most_tokens=None,
    )
