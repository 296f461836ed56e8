"""The sources of a job that is not prepared: listed, parted into virtual shards, with a tokenizer and held-out text."""

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.atomic import write_atomic
from meshwright.data.cache import cache_root
from meshwright.data.own_sources import with_files
from meshwright.data.prepared.workers import train_on
from meshwright.data.raw import Taking, Text, Unit, list_inputs, plan_units, read_unit
from meshwright.data.raw.inputs import identity_of
from meshwright.data.store import Int64Array
from meshwright.data.streaming.shard import START, Cursor, Recipe, VirtualShard, held_out
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.errors import UserError
from meshwright.job.data import Data

_SMALLEST_UNIT_BYTES, _LARGEST_UNIT_BYTES = 1 << 16, 32 << 20
_UNITS_A_SHARD = 4


@dataclass(frozen=True)
class Flow:
    """Units of the input and how many virtual shards they are dealt out to; the same for any number of ranks."""

    units: tuple[Unit, ...]
    shards: int
    tokenizer: Tokenizer
    text_field: str
    validation_fraction: float
    shuffle_buffer: int
    mask_documents: bool
    identity: str
    notes: tuple[str, ...]
    """What of the sources is not read, a sentence each."""
    most_tokens: int | None
    """More tokens than this cannot be in the sources; None if nobody knows before they are read."""

    def fingerprint(self) -> str:
        """Changes with anything that would change the stream."""
        told = [self.identity, self.shards, self.shuffle_buffer, self.tokenizer.fingerprint(), self.validation_fraction]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    def shard(self, number: int, sequence_length: int, seed: int, cursor: Cursor = START) -> VirtualShard:
        """One of the virtual shards, from a cursor on."""
        recipe = Recipe(
            self.tokenizer,
            self.text_field,
            self.validation_fraction,
            sequence_length,
            self.shuffle_buffer,
            self.mask_documents,
            seed,
        )
        return VirtualShard(number, self.units[number :: self.shards], recipe, cursor)

    def held_out(self, tokens: int) -> "MemoryTokens":
        """Documents that training never sees, in the order of the input, until there are so many tokens of them."""
        found = array("I")  # a list of integers would take ten times the memory
        starts: list[int] = []
        if self.validation_fraction == 0:
            return MemoryTokens([], [])
        for unit in self.units:
            for number, item in enumerate(read_unit(unit, Taking(self.text_field))):
                if isinstance(item, Text) and held_out(unit.number, number, item.file, self.validation_fraction):
                    starts += [len(found)] if item.begins else []
                    found.extend(self.tokenizer.encode(item.text) + [self.tokenizer.end_of_text] * item.ends)
                if len(found) >= tokens:
                    return MemoryTokens(found[:tokens], starts)
        return MemoryTokens(found, starts)


class MemoryTokens:
    """A few tokens, held in memory."""

    def __init__(self, tokens: Sequence[int], starts: Sequence[int]) -> None:
        self._tokens, self._starts = np.array(tokens, np.uint32), np.array(starts, np.int64)

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> Int64Array:
        """The tokens from start up to stop."""
        return self._tokens[start:stop].astype(np.int64)

    def starts_between(self, start: int, stop: int) -> Int64Array:
        """Where documents start, start included and stop not."""
        return self._starts[(self._starts >= start) & (self._starts < stop)]

    def targets(self, start: int, stop: int) -> None:
        """All tokens count in the loss."""


def open_flow(data: Data, vocab_size: int) -> Flow:
    """The flow of a job's data section; a tokenizer that had to be trained is kept in the cache."""
    data = with_files(data)
    inputs = list_inputs(data.sources)
    wanted = inputs.size_bytes // (data.virtual_shards * _UNITS_A_SHARD)
    units = plan_units(inputs.files, max(_SMALLEST_UNIT_BYTES, min(_LARGEST_UNIT_BYTES, wanted)))
    identity = hashlib.sha256(json.dumps([list(identity_of(inputs.files)), data.text_field]).encode()).hexdigest()
    if data.tokenizer is not None:
        tokenizer = load_tokenizer(Path(data.tokenizer).expanduser())
    else:
        path = cache_root(data.cache) / f"stream-{identity[:20]}-{vocab_size}.tokenizer.json"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, train_on(units, Taking(data.text_field), vocab_size), durable=True)
        tokenizer = load_tokenizer(path, str(path))
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"data.tokenizer = {data.tokenizer} has {tokenizer.vocab_size} entries but model.vocab_size = "
            f"{vocab_size}; set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    return Flow(
        tuple(units),
        min(data.virtual_shards, len(units)),
        tokenizer,
        data.text_field,
        data.validation_fraction,
        data.shuffle_buffer,
        data.mask_documents,
        identity,
        inputs.notes,
        inputs.most_tokens,
    )
