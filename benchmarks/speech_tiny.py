"""Trains the recipe speech-tiny and lets it write down sounds that it has not heard.

python benchmarks/speech_tiny.py [--sounds 1000] [--set run.steps=700]

A transcript is written greedily, one key after the other, until the model says that it ends. Then a few steps are
trained three times: as they are, from the checkpoint in their middle on, and on two ranks (dp_shard 2, zero 3), and the
losses compared.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from vlm_tiny import FEW, learned, repeated

from meshwright.data.batch import stack_samples
from meshwright.data.tones import END, MOST_KEYS, WORDS, ToneWindows, tones_corpus
from meshwright.job import Job
from meshwright.model import Decoder

RECIPE, AT_ONCE = "speech-tiny", 100


def transcripts(model: Decoder, windows: ToneWindows, sounds: int) -> list[tuple[str, str]]:
    """What was dialled and what the model writes, for the first sounds of these windows."""
    pairs = []
    for first in range(0, sounds, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, sounds))
        batch = stack_samples([windows.read(number) for number in numbers], numbers)
        rows = torch.arange(len(numbers))
        # Everything after the sound is the model's to write.
        places = torch.tensor([windows.filled(number) * windows.slots.tokens for number in numbers])
        tokens_BS = torch.where(torch.arange(windows.sequence_length) < places.unsqueeze(1), batch.tokens_BS, END)
        written = torch.full((len(numbers), MOST_KEYS + 1), END)
        for step in range(MOST_KEYS + 1):
            with torch.no_grad():
                logits_BSV = model(tokens_BS, media=batch.media)
            written[:, step] = logits_BSV[rows, places + step - 1].argmax(-1)
            tokens_BS[rows, (places + step).clamp(max=windows.sequence_length - 1)] = written[:, step]
        for number, row in zip(numbers, written.tolist(), strict=True):
            said = row[: row.index(END)] if END in row else row
            heard = "".join(WORDS[token] if token < len(WORDS) else "?" for token in said)
            pairs.append((windows.dialled(number).keys, heard))
    return pairs


def distance(one: str, other: str) -> int:
    """Keys to insert, remove or change until both are equal."""
    row = list(range(len(other) + 1))
    for place, key in enumerate(one, 1):
        before, row[0] = row[0], place
        for column, their_key in enumerate(other, 1):
            before, row[column] = row[column], min(before + (key != their_key), row[column] + 1, row[column - 1] + 1)
    return row[-1]


def held_out(job: Job) -> ToneWindows:
    """The sounds that the job does not train on."""
    corpus = tones_corpus(job.model.audio, job.model.vocab_size, job.batch.sequence_length, 0)
    assert corpus.windows is not None and isinstance(corpus.windows[1], ToneWindows)
    return corpus.windows[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sounds", type=int, default=1000)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        job, model = learned(RECIPE, options.set, Path(scratch) / "run")
        pairs = transcripts(model, held_out(job), options.sounds)
        exact, apart = repeated(Path(scratch), RECIPE)
    keys = sum(len(dialled) for dialled, _ in pairs)
    wrong = sum(distance(dialled, heard) for dialled, heard in pairs)
    whole = sum(dialled == heard for dialled, heard in pairs)
    sys.stdout.write(f"keys        {keys - wrong:5} of {keys:5} right: {1 - wrong / keys:.1%}\n")
    sys.stdout.write(f"transcripts {whole:5} of {len(pairs):5} right: {whole / len(pairs):.1%}\n")
    for dialled, heard in [pair for pair in pairs if pair[0] != pair[1]][:5]:
        sys.stdout.write(f"  {dialled} was heard as {heard}\n")
    sys.stdout.write(f"{FEW} steps: resumed in the middle {'equal' if exact else 'NOT equal'}; ")
    sys.stdout.write(f"on two ranks the losses differ by at most {apart:.1e}\n")
    sys.exit(0 if 1 - wrong / keys >= 0.95 and whole / len(pairs) >= 0.9 and exact and apart < 1e-4 else 1)


if __name__ == "__main__":
    main()
