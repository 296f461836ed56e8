"""Which line of a model's own sharding table is wrong, if a layout that shards by it fails."""

from collections.abc import Iterator
from types import TracebackType

import torch
from torch import nn

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.model import Architecture, build_architecture

_LONGEST = 200
_FEW_TOKENS = 8


def uses_own_table(job: Job) -> bool:
    """Whether a job shards a model of the user's own by its table."""
    return job.model.file is not None and job.layout.tp > 1


def fails_without_table(job: Job) -> bool:
    """Whether the model fails on one device, too; on the meta device, so that any size costs next to nothing."""
    length = min(_FEW_TOKENS, job.batch.sequence_length)
    try:
        with torch.device("meta"):
            tokens = torch.zeros((1, length), dtype=torch.long)
            build_architecture(job.model).model(tokens, tokens, length).backward()
    except Exception:
        return True
    return False


def table_error(job: Job, error: Exception) -> UserError:
    """A failure of a model that is sharded by its own table, as a sentence that names the line to look at."""
    return UserError(_sentence(job, error))


def _sentence(job: Job, error: Exception) -> str:
    with torch.device("meta"):
        architecture = build_architecture(job.model)
    failed = failed_module(error)
    lines = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {lines[0] if lines else ''}"[:_LONGEST]
    place = f'model.file = "{job.model.file}"'
    name, why = next(_suspects(architecture, job), (failed, f"it fails there ({what})"))
    pattern = architecture.line(name) if name is not None else None
    if pattern is None:
        sharded = f"sharded by SHARDING over layout.tp = {job.layout.tp} ranks"
        return f"{place}: {sharded}, {failed or 'the backward'} fails ({what}); correct the table"
    return (
        f'{place}: SHARDING["{pattern}"] = "{architecture.sharding[pattern]}" does not work with layout.tp = '
        f"{job.layout.tp}: {why}; correct this line"
    )


def _suspects(architecture: Architecture, job: Job) -> Iterator[tuple[str | None, str]]:
    """Projections whose role contradicts their shape or place, first to last, and why.

    Only looked at after a failure: a model may have good reasons for any of it.
    """
    width = job.model.width
    gathers: dict[str, list[str]] = {}
    for name, module in architecture.model.named_modules():
        role = architecture.role(name)
        if role == "gather":
            gathers[name] = []
        if role not in ("column", "kv-column", "row") or not isinstance(module, nn.Linear):
            continue
        inside = next((gather for gather in gathers if name.startswith(f"{gather}.")), None)
        before = [] if inside is None else gathers[inside]
        if role == "row" and module.out_features != width:
            yield name, f"a row returns to the residual stream, {width} wide, and its outputs are {module.out_features}"
        elif role != "row" and module.in_features != width:
            yield name, f"a column takes the residual stream, {width} wide, and its inputs are {module.in_features}"
        elif inside is None:
            yield name, "no module around it has the role gather"
        elif role == "row" and not before:
            yield name, f"it is the first projection of {inside}, and a row ends what a column begins"
        before.append(role)


def failed_module(error: Exception) -> str | None:
    """The dotted name of the innermost module that was running, as far as the traceback knows."""
    running = [owner for owner in _owners(error.__traceback__) if isinstance(owner, nn.Module)]
    root = next((module for module in running if hasattr(module, "layers")), None)
    if root is None:
        return None
    names = {id(module): name for name, module in root.named_modules() if name}
    return next((names[id(module)] for module in reversed(running) if id(module) in names), None)


def _owners(traceback: TracebackType | None) -> Iterator[object]:
    """What each frame calls self, outermost first."""
    while traceback is not None:
        yield traceback.tb_frame.f_locals.get("self")
        traceback = traceback.tb_next
