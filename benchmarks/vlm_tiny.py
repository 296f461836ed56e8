"""Trains the recipe vlm-tiny and asks it questions about drawings that it has not seen.

python benchmarks/vlm_tiny.py [--questions 2000] [--set run.steps=500]

Then it trains a few steps three times: as they are, from the checkpoint in their middle on, and on two ranks (dp_shard
2, zero 3), and compares the losses.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.console import Console

from meshwright.checkpoint import load_weights, newest_weights
from meshwright.data.batch import stack_samples
from meshwright.data.samples import IGNORE
from meshwright.data.shapes import END, WORDS, ShapeWindows, shapes_corpus
from meshwright.job import Job, load_job
from meshwright.launch.worker import run_job
from meshwright.model import Decoder
from meshwright.train import generate

RECIPE = "vlm-tiny"
FEW = 20
"""Steps that are trained several times."""


def answers(model: Decoder, windows: ShapeWindows, questions: int) -> tuple[Counter[str], Counter[str], list[str]]:
    """Questions asked and answered right, by their kind, and a few of the wrong answers.

    Asked as `meshwright generate --image` asks: the most likely word after word, up to the end; every word counts.
    """
    asked, right, wrong = Counter[str](), Counter[str](), list[str]()
    for number in range(questions):
        drawing, sample = windows.drawing(number), windows.read(number)
        first = int((sample.labels_S != IGNORE).argmax()) + 1
        media = stack_samples([sample], [number]).media
        room = windows.sequence_length - first
        given = generate(model, sample.tokens_S[:first].tolist(), room, temperature=0, stop={END}, media=media)
        said = " ".join(WORDS[token] if token < len(WORDS) else "?" for token in given)
        asked[drawing.question] += 1
        if said == drawing.answer:
            right[drawing.question] += 1
        else:
            wrong.append(f"{drawing.question}? {drawing.answer} was answered: {said}")
    return asked, right, wrong


def held_out(job: Job) -> ShapeWindows:
    """The drawings that the job does not train on."""
    corpus = shapes_corpus(job.model.vision, job.model.vocab_size, job.batch.sequence_length, 0)
    assert corpus.windows is not None and isinstance(corpus.windows[1], ShapeWindows)
    return corpus.windows[1]


def losses(run: Path) -> list[float]:
    """The loss of every step of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def trained(recipe: str, run: Path, settings: list[str], *options: str) -> list[float]:
    """The losses of a short run of a recipe by the command line."""
    few = [f"run.steps={FEW}", f"checkpoint.every_steps={FEW // 2}", "evaluation.every_steps=0", f"run.folder={run}"]
    command = [sys.executable, "-m", "meshwright", "train", recipe, *options]
    for setting in (*few, *settings):
        command += ["--set", setting]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return losses(run)


def repeated(scratch: Path, recipe: str) -> tuple[bool, float]:
    """Whether a resumed run gives exactly the losses of the whole one, and by how much those of two ranks differ."""
    whole = trained(recipe, scratch / "whole", [])
    shutil.rmtree(sorted((scratch / "whole" / "checkpoints").iterdir())[-1])
    resumed = trained(recipe, scratch / "whole", [], "--resume")
    half = load_job(recipe).job.batch.micro_batch // 2
    ranks = ["layout.dp_shard=2", "layout.zero=3", f"batch.micro_batch={half}"]
    two = trained(recipe, scratch / "ranks", ranks, "--nproc", "2")
    return resumed[-FEW // 2 :] == whole[FEW // 2 :], max(abs(a - b) / b for a, b in zip(two, whole, strict=True))


def learned(recipe: str, settings: list[str], run: Path) -> tuple[Job, Decoder]:
    """A recipe's job, trained as a whole, and the model it ends with; prints steps, seconds and losses."""
    loaded = load_job(recipe, [*settings, f"run.folder={run}"])
    started = time.monotonic()
    run_job(loaded, Console())
    seconds, found = time.monotonic() - started, losses(run)
    model = Decoder(loaded.job.model)
    step = load_weights(newest_weights(run), model)
    sys.stdout.write(f"{step} steps in {seconds:.0f} s, loss {found[0]:.3f} → {found[-1]:.4f}\n")
    return loaded.job, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        job, model = learned(RECIPE, options.set, Path(scratch) / "run")
        asked, right, wrong = answers(model, held_out(job), options.questions)
        exact, apart = repeated(Path(scratch), RECIPE)
    for question, count in asked.items():
        sys.stdout.write(f"{question:14} {right[question]:5} of {count:5} right\n")
    share = right.total() / asked.total()
    sys.stdout.write(f"{'all':14} {right.total():5} of {asked.total():5} right: {share:.1%}\n")
    for line in wrong[:5]:
        sys.stdout.write(f"  {line}\n")
    sys.stdout.write(f"{FEW} steps: resumed in the middle {'equal' if exact else 'NOT equal'}; ")
    sys.stdout.write(f"on two ranks the losses differ by at most {apart:.1e}\n")
    sys.exit(0 if share >= 0.95 and exact and apart < 1e-4 else 1)


if __name__ == "__main__":
    main()
