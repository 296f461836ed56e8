"""Steps of a flow: sample i is the next of virtual shard i mod the number of shards, whoever reads it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch.utils.data import IterableDataset, get_worker_info

from meshwright.data.batch import Step, stack_samples
from meshwright.data.readers import Readers, WorkerDied, failure_of
from meshwright.data.samples import Sample
from meshwright.data.streaming.flow import Flow
from meshwright.data.streaming.shard import START, Cursor, VirtualShard
from meshwright.data.watch import Roll
from meshwright.errors import UserError

_Part = list[tuple[int, Sample, Cursor]]


class StreamLoader:
    """An endless iterator over steps, like `Loader`; position and cursors are all that is needed to go on.

    Of every step, rank r of n reads the samples whose number leaves r when divided by n: where n divides the number of
    virtual shards, each shard is one rank's alone and is tokenised once.
    """

    def __init__(
        self,
        flow: Flow,
        *,
        seed: int,
        sequence_length: int,
        global_batch: int,
        position: int = 0,
        cursors: Mapping[int, Cursor] | None = None,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        rank: int = 0,
        ranks: int = 1,
        total: Callable[[int], float] | None = None,
    ) -> None:
        if position and (lacking := sorted(set(range(flow.shards)) - set(cursors or ()))):
            raise UserError(
                f"the stream cannot continue at sample {position} without the cursor of shard {lacking[0]}; resume "
                "from an earlier checkpoint or start a new run"
            )
        self.cursors: dict[int, Cursor] = {**dict.fromkeys(range(flow.shards), START), **(cursors or {})}
        """Of every virtual shard, a block from which the next sample of it can be reached."""
        roll = Roll(workers)
        self._parts = _Parts(flow, seed, sequence_length, global_batch, rank, ranks, max(1, workers), roll)
        self.readers = Readers(self._parts, roll, workers=workers, prefetch=prefetch)
        self._global_batch, self._tokens = global_batch, global_batch * sequence_length
        self._position, self._rank, self._ranks = position, rank, ranks
        self._workers, self._pin_memory = workers, pin_memory
        self._total = total
        self._uniform = not flow.mask_documents
        self.epochs: tuple[float, ...] = ()

    @property
    def position(self) -> int:
        """Number of the first sample not yet handed out."""
        return self._position

    def own_cursors(self) -> dict[int, Cursor]:
        """Those that are this rank's to save; all ranks' together are all there are."""
        return {number: cursor for number, cursor in self.cursors.items() if number % self._ranks == self._rank}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        self.start()
        found: _Part = []
        for _ in range(max(1, self._workers)):
            part: _Part | UserError | WorkerDied = self.readers.next()
            if isinstance(part, UserError | WorkerDied):
                self.close()
                raise part
            found += part
        found.sort(key=lambda entry: entry[0])
        for number, _, cursor in found:
            self.cursors[number % len(self.cursors)] = cursor
        batch = stack_samples([sample for _, sample, _ in found], [number for number, _, _ in found])
        self._position += self._global_batch
        valid = float(self._tokens)
        if not self._uniform:
            valid = batch.valid_count() if self._total is None else self._total(batch.valid_count())
        step = Step(batch, valid, self._tokens)
        return step.pin_memory() if self._pin_memory else step

    def start(self) -> None:
        """Have the workers read ahead from now on."""
        if not self.readers.started:
            self._parts.begin(self._position, dict(self.cursors))
            self.readers.start()

    def close(self) -> None:
        """End the workers; iterating again starts new ones at the position."""
        self.readers.close()


@dataclass
class _Parts(IterableDataset[Any]):
    """Of every step, the samples that fall to one worker: those of its own shards."""

    flow: Flow
    seed: int
    sequence_length: int
    global_batch: int
    rank: int
    ranks: int
    workers: int
    roll: Roll
    position: int = 0
    cursors: Mapping[int, Cursor] | None = None

    def begin(self, position: int, cursors: Mapping[int, Cursor]) -> None:
        """Where iterating will begin."""
        self.position, self.cursors = position, cursors

    def __iter__(self) -> Iterator[_Part | UserError | WorkerDied]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        assert self.cursors is not None
        shards: dict[int, VirtualShard] = {}
        first = self.position
        try:
            while True:
                self.roll.begins(worker, first)
                part: _Part = []
                for sample in range(first, first + self.global_batch):
                    turn, number = divmod(sample, self.flow.shards)
                    if sample % self.ranks != self.rank or number // self.ranks % self.workers != worker:
                        continue
                    if number not in shards:
                        cursor = self.cursors[number]
                        shards[number] = self.flow.shard(number, self.sequence_length, self.seed, cursor)
                    read = shards[number].read(turn)
                    part.append((sample, read, shards[number].cursor))
                self.roll.ends(worker)
                yield part
                first += self.global_batch
        except UserError as error:
            yield error
        except Exception as error:
            if info is None:
                raise
            files = {piece.file.name for shard in shards.values() for piece in shard.unit.pieces}
            yield failure_of(self.roll, worker, error, f"one of {', '.join(sorted(files)[:3]) or 'data.sources'}")
