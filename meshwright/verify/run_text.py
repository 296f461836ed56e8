"""Text for a check of the run itself: small, on disk, in the form the job reads, and shorter than the run."""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from meshwright.data import SHAPES
from meshwright.data.own_sources import is_own_source
from meshwright.data.prepared import Wishes, build, is_prepared
from meshwright.data.raw import SYNTHETIC
from meshwright.data.tokenizer import SMALLEST_VOCABULARY, train_tokenizer
from meshwright.job import Job
from meshwright.job.data import Data, Stage
from meshwright.verify.run_pictures import write_samples
from meshwright.verify.shrink import Change

EPOCHS = 1.9
"""About how often a run reads its text: an epoch ends within it."""
HELD_OUT = 0.25
MOST_SOURCES = 3
STREAMED_FILES = 4
"""Each becomes a unit, and so a virtual shard."""
UNIT_BYTES = 50_000
"""More than half of a stream's smallest unit, so that no two files share one."""
WORDS = (
    "a",
    "stone",
    "falls",
    "into",
    "the",
    "deep",
    "well",
    "and",
    "nobody",
    "hears",
    "it",
    "but",
    "one",
    "old",
    "dog",
)


def data_for(data: Data) -> tuple[Data, list[Change]]:
    """The data section of a run that reads such text, still with the job's sources, and what else is changed."""
    notes, changes = list[Change](), dict[str, Any](cache=None, chat_template=None)
    changes["validation_fraction"] = HELD_OUT if data.validation_fraction else 0.0
    changes["workers"] = max(1, min(data.workers, 2))
    changes["prefetch"] = min(data.prefetch, 2)
    sources = data.sources[:MOST_SOURCES]
    if len(sources) < len(data.sources):
        notes.append(Change(f"data.sources: {len(data.sources)} → {len(sources)}"))
        changes |= {"sources": sources}
        if data.weights is not None:
            changes["weights"] = _weights(data.weights)
            changes["stages"] = tuple(Stage(tokens=s.tokens, weights=_weights(s.weights)) for s in data.stages)
    if changes["workers"] != data.workers:
        notes.append(Change(f"data.workers {data.workers} → {changes['workers']}"))
    if data.stream:
        changes |= {"virtual_shards": min(data.virtual_shards, STREAMED_FILES), "shuffle_buffer": 4}
        notes.append(Change(f"data.virtual_shards → {changes['virtual_shards']}, data.shuffle_buffer → 4"))
    if data.stages:
        notes.append(Change("data.stages: evenly over the run"))
    if data.chat_template is not None:
        notes.append(Change("data.chat_template → prompts with their completions", hides=True))
    return Data.model_validate(data.model_dump() | changes), notes


def _weights(weights: tuple[float, ...]) -> tuple[float, ...]:
    kept = weights[:MOST_SOURCES]
    return kept if any(kept) else (1.0,) * len(kept)


def is_prepared_data(data: Data) -> bool:
    """Whether a job reads folders that `data prepare` made."""
    return any(is_prepared(name) for name in data.sources)


def form_of(data: Data, prepared: bool) -> str:
    """What kind of text a job reads, in words."""
    if data.stream:
        return "JSONL files, streamed"
    if prepared:
        return "prepared folders"
    if data.fields:
        return "samples with pictures"
    if SYNTHETIC in data.sources:
        return "text files (the job's tokens are synthetic)"
    return "JSONL files" if _in_lines(data) else "text files"


def write_text(job: Job, folder: Path, prepared: bool) -> Job:
    """Write text of the kind that a job reads, for it and its evaluation sets, and return the job that reads it."""
    data, samples = job.data, job.run.steps * job.batch.global_batch
    sources: list[str] = []
    for number, share in enumerate(_shares(data)):
        if is_own_source(data.sources[number]) or data.sources[number] == SHAPES:
            # The user's code is what is to be verified, and drawings need no file.
            sources.append(data.sources[number])
            continue
        windows = max(3.0, share * samples / EPOCHS) / (1 - HELD_OUT)
        if data.fields:
            sources.append(write_samples(folder / f"source-{number}", job, windows, number))
            continue
        documents = list(_documents(windows, job.batch.sequence_length, alone=data.packing == "none", seed=number))
        if job.prefers:
            documents = [document[: 3 * _part_of_pair(job)] for document in documents]
        sources.append(str(_write(folder / f"source-{number}", documents, data, first=number == 0)))
    changes: dict[str, Any] = {"cache": str(folder / "cache"), "sources": tuple(sources)}
    if data.stages:
        changes["stages"] = _stages(data.stages, samples * job.batch.sequence_length)
    if data.tokenizer is not None or prepared:
        path = folder / "tokenizer.json"
        train_tokenizer(WORDS, SMALLEST_VOCABULARY).save(path)
        changes["tokenizer"] = str(path)
    if prepared:
        changes["sources"] = tuple(_prepare(Path(source), data, Path(changes["tokenizer"])) for source in sources)
        changes |= {"tokenizer": None, "join": None}
    sets = {name: _write_set(folder / f"set-{number}", job) for number, name in enumerate(job.evaluation.sets)}
    evaluation = job.evaluation.model_copy(update={"sets": sets})
    return job.model_copy(update={"data": data.model_copy(update=changes), "evaluation": evaluation})


def _write_set(path: Path, job: Job) -> str:
    if job.data.fields:
        return write_samples(path, job, job.batch.global_batch, len(path.name))
    path.mkdir()
    documents = _documents(job.batch.global_batch, job.batch.sequence_length, alone=False, seed=len(path.name))
    (path / "text.txt").write_text("\n".join(documents), encoding="utf-8")
    return str(path)


def _shares(data: Data) -> Sequence[float]:
    """About the share of the run that each source provides."""
    if data.join is not None:  # each holds a part of every document
        return [1.0] * len(data.sources)
    if data.weights is None:
        return [1 / len(data.sources)] * len(data.sources)
    every = [data.weights, *(stage.weights for stage in data.stages)]
    means = [sum(weights[source] / sum(weights) for weights in every) / len(every) for source in range(len(every[0]))]
    return means


def _stages(stages: Sequence[Stage], tokens: int) -> tuple[Stage, ...]:
    """Evenly over the run."""
    return tuple(
        Stage(tokens=tokens * (number + 1) // (len(stages) + 1), weights=stage.weights)
        for number, stage in enumerate(stages)
    )


def _documents(windows: float, length: int, *, alone: bool, seed: int) -> Iterator[str]:
    """Documents that fill a number of windows of a length, each in its own or all as one text; a token is a byte.

    Neighbours are alike in length, so that one sequence has a boundary every few tokens and the next has none.
    """
    chance = random.Random(seed)
    while windows > 0:
        longest = chance.choice((length // 3, length, 2 * length))
        for size in (chance.randint(max(3, longest // 2), max(4, longest)) for _ in range(3)):
            yield _sentence(chance, size)
            windows -= -(-size // length) if alone else (size + 1) / length


def _sentence(chance: random.Random, size: int) -> str:
    words = list(islice(iter(lambda: chance.choice(WORDS), None), size))
    return " ".join(words)[:size].ljust(size, ".")


def _in_lines(data: Data) -> bool:
    return data.format != "text" or data.join is not None or any(".json" in name for name in data.sources)


def _write(path: Path, documents: list[str], data: Data, *, first: bool) -> Path:
    path.mkdir()
    if not (data.stream or _in_lines(data)):
        for number, document in enumerate(documents):
            (path / f"{number:04}.txt").write_text(document, encoding="utf-8")
        return path
    records = [_record(number, document, data, first=first) for number, document in enumerate(documents)]
    files = STREAMED_FILES if data.stream else 1
    for number in range(files):
        own = records[number::files]
        if data.stream:  # what no field of the text's holds counts as bytes of the file, not as text
            own = [record | {"beside": "-" * (UNIT_BYTES // len(own))} for record in own]
        lines = "".join(json.dumps(record) + "\n" for record in own)
        (path / f"{number}.jsonl").write_text(lines, encoding="utf-8")
    return path if data.stream else path / "0.jsonl"


def _record(number: int, document: str, data: Data, *, first: bool) -> dict[str, Any]:
    half = len(document) // 2
    if data.format == "preferences":
        third = len(document) // 3
        answers = {"chosen": f"y{document[third : 2 * third - 1]}", "rejected": f"n{document[2 * third : -1]}"}
        return {"prompt": document[:third], **answers}
    if data.format == "conversations":
        return {"prompt": document[:half], "completion": document[half:]}
    if data.join is None:
        return {data.text_field: document}
    return {data.text_field: document[:half] if first else document[half:], data.join: number}


def _part_of_pair(job: Job) -> int:
    """Tokens of a prompt and of each answer so that a pair, the prompt twice and two ends, fits into a sequence."""
    return (job.batch.sequence_length - 2) // 4


def _prepare(source: Path, data: Data, tokenizer: Path) -> str:
    out = source.with_name(f"{source.name.partition('.')[0]}-prepared")
    wishes = Wishes(
        (str(source),),
        tokenizer=tokenizer,
        text_field=data.text_field,
        content=data.format,
        validation_fraction=HELD_OUT,
        fields=data.fields,
    )
    build(wishes, out, workers=1)
    return str(out)
