"""A rehearsal on disk: a run folder of its own kind, with `rehearsal.json` in place of metrics and checkpoints."""

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from meshwright.atomic import atomic_folder, disk_refusal, write_atomic
from meshwright.errors import UserError
from meshwright.reading import REHEARSAL, Unfit, is_number, parse_json, read_plain
from meshwright.rehearse.result import Rehearsal
from meshwright.rehearse.words import summary
from meshwright.runs import RunFolder
from meshwright.runs.rehearsed import REHEARSED

if TYPE_CHECKING:
    from meshwright.job import LoadedJob

LARGEST = 32 << 20
"""Size limit of `rehearsal.json`: it names every rank of every group, and a world may have many thousands."""
_MOST_NAMES, _LONGEST_TEXT = 256, 4000
"""Of a table and of a sentence in it: more than any rehearsal has, as pages show all of them."""


def require_free(path: Path, option: str = "--out") -> None:
    """Reject a folder that is taken, before anything is measured for it; an empty one is fine."""
    if not RunFolder.is_free(path):
        raise UserError(f"{option} = {path} exists and is not an empty folder; choose another")


def save_rehearsal(path: Path, loaded: "LoadedJob", rehearsal: Rehearsal, argv: list[str]) -> RunFolder:
    """Write a rehearsal's folder with its job, code version and environment: all of it or nothing."""
    require_free(path)
    content = json.dumps(rehearsal.to_json(), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
    file, original = (loaded.raw, None) if loaded.merged is None else (loaded.merged, loaded.raw)
    try:
        with atomic_folder(path) as draft:
            folder = RunFolder.create(draft, file, loaded.job.model_dump(mode="json"), argv, original)
            write_atomic(draft / REHEARSAL, content)
            folder.event(REHEARSED, device=rehearsal.device, result=summary(rehearsal))
            folder.event("stop", reason="finished")
            folder.require_written()
            folder.close()
    except OSError as error:
        raise disk_refusal(f"--out = {path}", error) or error from error
    return RunFolder.open(path)


def read_rehearsal(run: Path) -> Rehearsal:
    """What a rehearsal in a run folder found; a damaged or foreign file is refused in one sentence."""
    path = run / REHEARSAL
    try:
        return parse_rehearsal(read_plain(path, LARGEST))
    except FileNotFoundError:
        raise UserError(f"{run} holds no rehearsal; give a folder that `meshwright rehearse --out` wrote") from None
    except Unfit as unfit:
        raise UserError(f"{path} is damaged ({unfit}); rehearse the job again") from unfit


def parse_rehearsal(data: bytes) -> Rehearsal:
    """A rehearsal from the bytes of its file; raises Unfit if they are anything else."""
    saved = parse_json(data)
    if not isinstance(saved, dict):
        raise Unfit("it is not a table of fields")
    try:
        rehearsal = Rehearsal.from_json(saved)
    except (KeyError, TypeError, AttributeError):
        raise Unfit("it does not have the fields of a rehearsal of this version") from None
    if (wrong := _wrong(rehearsal, Rehearsal)) is not None:
        raise Unfit(f"its {wrong} has the wrong type, is negative or too large")
    return rehearsal


def _wrong(value: Any, kind: Any) -> str | None:
    """The path of the first value that is not of its declared type; None if all are."""
    if is_dataclass(kind):
        if not isinstance(value, kind):  # type: ignore[arg-type]
            return ""
        hints = get_type_hints(kind)
        return _first({field.name: (getattr(value, field.name), hints[field.name]) for field in fields(kind)})
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        found = [_wrong(value, one) for one in inner]
        return None if None in found else max((one for one in found if one is not None), key=len)
    if origin is tuple:
        return _first({str(place): (one, inner[0]) for place, one in enumerate(value)})
    if origin is dict:
        if not isinstance(value, dict) or len(value) > _MOST_NAMES:
            return ""
        return _first({key: (one, inner[1]) for key, one in value.items()})
    return None if _is_plain(value, kind, inner if origin is Literal else ()) else ""


def _first(values: dict[str, tuple[Any, Any]]) -> str | None:
    for name, (value, kind) in values.items():
        if (wrong := _wrong(value, kind)) is not None:
            return f"{name}.{wrong}".removesuffix(".")
    return None


def _is_plain(value: Any, kind: Any, allowed: tuple[Any, ...]) -> bool:
    if allowed:
        return value in allowed
    if kind is Any:
        return True
    if kind in (int, float):
        return is_number(value) and (kind is float or (type(value) is int and value >= 0))  # ranks, bytes, counts
    if kind is str:
        return isinstance(value, str) and len(value) <= _LONGEST_TEXT
    return isinstance(value, NoneType if kind in (None, NoneType) else kind)
