"""Run folders and Hugging Face folders: import, export, and a run that starts from such a folder."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.atomic import new_folder
from meshwright.checkpoint import (
    GENERATION,
    Checkpoint,
    Export,
    Exported,
    HfWeights,
    PeftAdapter,
    checkpoints,
    export_adapter,
    import_weights,
    keep_companions,
    learned_generation,
    whisper_start,
)
from meshwright.data import Corpus
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import UserError
from meshwright.job import Job, fetch_start, folder_of, hub_name, model_of_folder, pinned_start, start_folder
from meshwright.job.hub import Tell, fetch_weights
from meshwright.job.training import Batch
from meshwright.model import count_parameters
from meshwright.runs.folder import RunFolder

Report = Callable[[int, int], None]
"""Called with the bytes done and the total."""


@dataclass(frozen=True)
class Imported:
    """The result of importing a Hugging Face folder."""

    parameters: int
    bytes: int


def fetched(source: str, tell: Tell | None = None) -> str:
    """A Hugging Face folder as it is; a name with its commit, once its weights are in the cache."""
    name = pinned_start(source)
    fetch_weights(name, name, tell)
    return name


def import_folder(source: str | Path, out: Path, report: Report = lambda done, total: None) -> Imported:
    """Create a run folder at step 0 from a Hugging Face folder or name, completely or not at all."""
    name = fetched(str(source))
    folder = folder_of(name)
    shape = model_of_folder(folder)
    name = str(folder.absolute()) if hub_name(name) is None else name
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        load_tokenizer(tokenizer, str(tokenizer))
    sequence = min(Batch().sequence_length, shape.max_sequence_length)
    sections: dict[str, dict[str, Any]] = {
        "model": shape.model_dump() | {"init_from": name},
        "data": {"tokenizer": str(tokenizer.absolute())}
        if tokenizer.is_file()
        else {"sources": ("builtin:synthetic",)},
        "batch": {"sequence_length": sequence},
    }
    count = count_parameters(shape)
    job = Job.model_validate(sections).model_dump(mode="json")
    with new_folder(out, 4 * count) as draft:
        run = RunFolder.create(draft, _job_file(sections), job, sys.argv)
        keep_companions(folder, draft)
        if tokenizer.is_file():
            run.write("tokenizer.json", tokenizer.read_text(encoding="utf-8"))
        path = import_weights(folder, shape, draft, job, _added_up(report, 4 * count))
        run.event("import", source=name, step=0, path=str(path.relative_to(draft)))
        run.event("stop", reason="finished", step=0)
        run.close()
    return Imported(count, 4 * count)


def export_run(
    run: Path,
    out: Path,
    dtype: str,
    report: Report = lambda done, total: None,
    checkpoint: Checkpoint | None = None,
) -> Exported:
    """Write a run's newest weights, or one checkpoint's, as a Hugging Face folder, completely or not at all."""
    job = RunFolder.open(run).resolved_job(trust=True)  # none of its code is run
    if job.model.file is not None:
        raise UserError(
            f"{run} trained model.file = {job.model.file}, which is not a Hugging Face architecture; use a preset"
        )
    export = Export(run, job.model, dtype, checkpoint, job.run.seed)
    return export.write(out, _added_up(report, export.bytes))


def export_run_adapter(run: Path, out: Path) -> tuple[int, int]:
    """Write the adapters of a run's newest checkpoint as a folder that PEFT loads; returns the step and the bytes."""
    return export_adapter(run, out, RunFolder.open(run).resolved_job(trust=True).model)  # none of its code is run


def require_start(job: Job, tell: Tell | None = None) -> None:
    """Download the initial weights if needed, and reject incomplete ones, before anything is written."""
    fetch_start(job.model, tell)
    if (folder := start_folder(job.model)) is not None:
        HfWeights(folder, job.model).require()
    if job.model.adapter is not None and job.model.adapter.init_from is not None:
        PeftAdapter(Path(job.model.adapter.init_from), job.model)
    if (listening := whisper_start(job.model)) is not None:
        listening.require()


def fetch_unless_resumed(job: Job, run: Path | None, tell: Tell | None = None) -> None:
    """Download the initial weights if needed, unless the run has a checkpoint to continue from that contains them."""
    if run is None or job.model.freezes or next(iter(checkpoints(run)), None) is None:
        fetch_start(job.model, tell)


def keep_start(job: Job, run: Path) -> None:
    """Keep the files that came with the initial weights for an export, unless another tokenizer is used."""
    folder = start_folder(job.model)
    if folder is None:
        return
    given, own = job.data.tokenizer, folder / "tokenizer.json"
    if given is None or (own.is_file() and own.samefile(Path(given).expanduser())):
        keep_companions(folder, run)


def small_files(corpus: Corpus, run: Path) -> dict[str, str]:
    """The small files of a run that are not about its training but about its model: tokenizer, chat template, and
    where it stops, unless what it started from says that already."""
    if corpus.tokenizer is None:
        return {}
    files = {"tokenizer.json": corpus.tokenizer.to_json()}
    if corpus.chat is not None:
        files |= corpus.chat.files()
    generation = learned_generation(run, corpus.tokenizer, corpus.chat)
    return files | ({} if generation is None else {GENERATION: generation})


def _job_file(sections: dict[str, dict[str, Any]]) -> str:
    """A job that starts from the folder, which has the shape."""
    lines = ["[model]", f"init_from = {json.dumps(sections['model']['init_from'])}"]
    if "sources" in sections["data"]:
        lines += ["[data]", 'sources = ["builtin:synthetic"]']
    return "\n".join([*lines, "[batch]", f"sequence_length = {sections['batch']['sequence_length']}", ""])


def _added_up(report: Report, total: int) -> Callable[[int], None]:
    done = 0

    def add(more: int) -> None:
        nonlocal done
        done += more
        report(done, total)

    return add
