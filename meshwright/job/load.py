"""Merge a job file, its preset and the command line's overrides into one Job, with the origin of every field."""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from meshwright.amounts import NoAmount, length
from meshwright.errors import UserError
from meshwright.job.adapter import complete_adapter
from meshwright.job.devices import Cluster
from meshwright.job.edit import edited_text
from meshwright.job.fields import MediaField, complete_fields
from meshwright.job.hf_whisper import complete_audio
from meshwright.job.init_from import folder_table, pinned_start, require_agreement, require_tokenizer
from meshwright.job.job import Job
from meshwright.job.overrides import Overrides, Table, inner_leaves, leaves, merge, parsed_overrides
from meshwright.job.presets import model_preset, nearest, preset_named, recipe_path, unknown_job
from meshwright.job.reading import json_table, read_settings_text, reason, require_undotted_keys, toml_table
from meshwright.job.sanitize import odd_character, without_secrets
from meshwright.job.text import job_text, table_text
from meshwright.job.training import Batch
from meshwright.job.trust import require_trust
from meshwright.job.unused import UnusedFieldWarning, unused_fields

RESOLVED = "job.resolved.json"
"""The job in a run folder with every field set, which can be loaded again."""

_NAMED_BY_USERS = ("data.fields", "evaluation.sets")
"""Fields whose keys are no settings."""


@dataclass(frozen=True)
class LoadedJob:
    """A resolved job and its origins."""

    job: Job
    name: str
    raw: str
    """The job file's text as written."""
    origins: dict[str, str]
    """Dotted field name → file, preset, init_from or override; a field not listed has its default. Keys of a field that
    is a table have their own (`model.experts.count`)."""

    from_run: bool = False
    """Whether the job was read from a run folder, which someone else may have created."""
    merged: str | None = None
    """A job file that loads as this job, if the one that was read does not: with the overrides as values."""

    def origin(self, field: str) -> str:
        """Where a field's value came from."""
        return self.origins.get(field, "default")


def load_job(source: str, overrides: Overrides = (), *, trust: bool = False) -> LoadedJob:
    """The job in a file (or the recipe of that name) with `section.field=value` overrides; errors raise UserError.

    A run folder that names code is rejected unless its code is trusted, or the caller runs none.
    """
    if odd := odd_character(source):
        raise UserError(f"{source!r} contains the control character {odd}, which a job's name may not; rename the file")
    path = _find(source)
    text = read_settings_text(path, "give a job file, saved as UTF-8")
    from_file = _run_table(path, text) if path.name == RESOLVED else _parsed(path, text)
    from_overrides = parsed_overrides(overrides)

    job, origins = _resolved(from_file, from_overrides, path)
    # A run's own record has every field, and a recipe's author knew.
    shipped = path.name == RESOLVED or path == recipe_path(source)
    chosen = [field for field, origin in origins.items() if origin == "override" or (origin == "file" and not shipped)]
    for sentence in unused_fields(job, chosen):
        warnings.warn(sentence, UnusedFieldWarning, stacklevel=2)
    from_run = path.parent.joinpath(RESOLVED).is_file()
    if from_run and not trust:
        require_trust(job, str(path.parent), frozenset(leaves(from_overrides)))
    raw = table_text(from_file, f"from {path}") if path.name == RESOLVED else text
    return LoadedJob(job, path.stem, raw, origins, from_run, _merged(from_file, from_overrides, job))


def _merged(from_file: Table, from_overrides: Table, job: Job) -> str | None:
    """The file's fields and those over them as a job file; None if the file alone gives the job."""
    start = job.model.init_from
    if not from_overrides and start == _model_name("init_from", from_file):
        return None
    merged: Table = {}
    # The commit that a Hugging Face name stood for, since the name may stand for another one later.
    for table in (from_file, from_overrides, {"model": {"init_from": start}} if start else {}):
        merge(merged, table)
    return table_text(merged, "the job that ran, overrides included; job.original.toml is the file as written")


def updated_text(text: str, changed: Mapping[str, Any], job: Job) -> str:
    """A job file with other values in some fields, loading as this job, in which they have these values.

    If more than these fields differ, as in the run folders of versions before 0.3, it lists every field.
    """
    heading = "the job as last resumed; job.original.toml is the file it started from"
    try:
        table = toml_table(text)
        for name, value in changed.items():
            section, field = name.split(".")
            if name != "run.folder":  # where it was started, if anywhere in particular
                table.setdefault(section, {})[field] = value
        new = table_text(table, heading)
        same = _resolved(toml_table(new), {}, Path("job.toml"))[0]
    except (UserError, ValueError, AttributeError, TypeError):  # altered by hand since
        return job_text(job, heading)
    return new if _loads_as(same, job) else job_text(job, heading)


def planned_text(loaded: LoadedJob, job: Job, fields: Iterable[str]) -> str:
    """The text of a job's file with the values that `job` has in these `section.field`, and nothing else changed.

    It is read again: if it were any other job than this one, a UserError says so.
    """
    values = job.model_dump(mode="json", exclude_none=True)
    changes = {name: values[name.partition(".")[0]].get(name.partition(".")[2]) for name in fields}
    text = edited_text(loaded.raw, changes, loaded.name)
    same = _resolved(toml_table(text), {}, Path(loaded.name))[0]
    for section in type(job).model_fields:
        if (now := getattr(same, section)) != (wanted := getattr(job, section)):
            different = [name for name in type(now).model_fields if getattr(now, name) != getattr(wanted, name)]
            raise UserError(
                f"{loaded.name} with another layout would be another job, with {section}.{different[0]} = "
                f"{getattr(now, different[0])}; report it, and change the layout by hand"
            )
    return text


def _loads_as(same: Job, job: Job) -> bool:
    """Whether a file's job is this one: the folder may be moved, and `auto` stands for the values that a run chose."""
    table, wanted = (one.model_dump(exclude={"run": {"folder"}}) for one in (same, job))
    return all(value in ("auto", wanted[key][name]) for key, fields in table.items() for name, value in fields.items())


def changed_job(job: Job, overrides: Overrides) -> Job:
    """A job with other values in some fields, checked anew; a new preset brings its whole shape."""
    table, given = job.model_dump(mode="json", exclude_unset=True), parsed_overrides(overrides)
    if _model_name("preset", given):
        table.pop("model", None)
    return _resolved(table, given, Path("job"))[0]


def _resolved(from_file: Table, from_overrides: Table, path: Path) -> tuple[Job, dict[str, str]]:
    """The job of a file's fields and of those over them, and where each came from."""
    preset = _model_name("preset", from_file, from_overrides)
    from_preset: Table = {"model": model_preset(preset)} if preset else {}
    preset = preset_named(preset) if preset else preset
    folder = _model_name("init_from", from_file, from_overrides)
    if folder:
        folder = pinned_start(folder)
    from_folder: Table = folder_table(folder) if folder else {}
    if folder:
        given = ((f"preset {preset}", from_preset), (str(path), from_file), ("--set", from_overrides))
        require_agreement(folder, from_folder["model"], given)
    tables = ((from_preset, f"preset {preset}"), (from_folder, f"init_from {folder}"))
    origins: dict[str, str] = {}
    merged: Table = {}
    for table, origin in (*tables, (from_file, "file"), (from_overrides, "override")):
        merge(merged, table)
        origins.update(dict.fromkeys((*leaves(table), *inner_leaves(table)), origin))
    if preset:
        merged["model"]["preset"] = preset  # however it was spelled
    if folder:
        merged["model"]["init_from"] = folder
        require_tokenizer(folder, merged)
    complete_adapter(merged)
    complete_audio(merged)
    complete_fields(merged)
    _derive_length(merged, origins)

    return _validate(merged, origins, path), origins


def _derive_length(merged: Table, origins: dict[str, str]) -> None:
    """Sequences that nobody gave a length are no longer than the model takes."""
    model, batch = merged.get("model", {}), merged.get("batch", {})
    if not isinstance(model, dict) or not isinstance(batch, dict) or "sequence_length" in batch:
        return
    try:
        longest = length(model.get("max_sequence_length"))
    except NoAmount:  # not given, or left to validation
        return
    if 0 < longest < Batch().sequence_length:
        merged["batch"] = {**batch, "sequence_length": longest}
        origins["batch.sequence_length"] = "model.max_sequence_length"


def job_of_table(table: Table, name: str) -> Job:
    """The job that tables of fields describe; errors raise UserError and refer to it as `name`."""
    return _validate(table, {}, Path(name))


def field_names() -> list[str]:
    """Every `section.field` of a job."""
    return [f"{name}.{field}" for name, section in _sections().items() for field in section.model_fields]


def job_fields() -> Iterator[tuple[str, str]]:
    """Every `section.field` with its one-line description."""
    for name, section in _sections().items():
        for field, info in section.model_fields.items():
            yield f"{name}.{field}", info.description or ""


def table_fields(name: str) -> dict[str, str]:
    """The fields of a `section.field` that is a table of its own (`model.experts`), with their descriptions; of others
    none."""
    section, _, field = name.partition(".")
    info = _sections()[section].model_fields.get(field) if section in _sections() else None
    tables = [one for one in get_args(info.annotation) if isinstance(one, type)] if info else []
    # One table or nothing: tables that differ by their only field, as in memory.recompute, are written in a line.
    if len(tables) != 2 or type(None) not in tables or not issubclass(tables[0], BaseModel):
        return {}
    return {key: own.description or "" for key, own in tables[0].model_fields.items()}


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Job.model_json_schema()}


def _sections() -> dict[str, type[BaseModel]]:
    return {
        name: info.annotation
        for name, info in Job.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    }


def _find(source: str) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    if (recipe := recipe_path(source)) is not None:
        return recipe
    if (path / RESOLVED).is_file():
        return path / RESOLVED
    raise UserError(unknown_job(source))


def _parsed(path: Path, text: str) -> Table:
    try:
        table = toml_table(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid TOML: {reason(error)}") from None
    try:
        require_undotted_keys(table, _NAMED_BY_USERS)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return table


def _run_table(path: Path, text: str) -> Table:
    """The job of a run folder: as it was resolved, but in that folder even if it was moved."""
    table = json_table(path, text, "the file was altered")
    if not all(isinstance(section, dict) for section in table.values()):
        raise UserError(f"{path}: not a table of a job's sections; the file was altered")
    table["run"] = {**table.get("run", {}), "folder": str(path.parent)}
    # Every field is written there; for the machines only what the job itself says may count.
    defaults = Cluster().model_dump()
    said = table.get("cluster", {}).items()
    table["cluster"] = {name: value for name, value in said if name not in defaults or value != defaults[name]}
    return table


def _model_name(field: str, *tables: Table) -> str | None:
    """The preset or folder that the last table names; anything but a string is left to validation."""
    name = None
    for table in tables:
        section = table.get("model")
        if isinstance(section, dict):
            name = section.get(field, name)
    return name if isinstance(name, str) else None


def _validate(merged: Table, origins: dict[str, str], path: Path) -> Job:
    try:
        # Through JSON, because strict mode then still accepts a list for a tuple but not "4" for 4.
        text = json.dumps(merged, default=str)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: a value is invalid: {reason(error)}; correct it") from None
    try:
        return Job.model_validate_json(text, strict=True)
    except ValidationError as error:
        sentences = [_sentence(dict(problem), origins, path) for problem in error.errors()]
        raise UserError("\n".join(_joined(sentences))) from None


def _joined(sentences: Iterable[str]) -> list[str]:
    """The sentences, those about what else one value may be as a single one."""
    joined: dict[str, str] = {}
    for sentence in sentences:
        problem, _, expectation = sentence.partition("; it should be ")
        joined[problem] = f"{joined[problem]}, or {expectation}" if expectation and problem in joined else sentence
    return list(joined.values())


def _sentence(problem: dict[str, Any], origins: dict[str, str], path: Path) -> str:
    location = [_shortened(without_secrets(str(part))) for part in problem["loc"]]
    if not location and problem["type"] == "json_invalid":
        return f"{path}: a text is not valid Unicode ({problem['ctx']['error']}); write it as UTF-8"
    field = ".".join(location[:2])
    where = "--set" if origins.get(field) == "override" else str(path)
    if field == "data.fields":  # a table of tables
        field = ".".join(location)
    if len(location) == 3 and (inside := table_fields(field)):
        table, field = field, ".".join(location)
        if problem["type"] == "missing":
            return f"{where}: {table} needs {location[2]}; set {field} ({_begun(inside[location[2]])})"
    if problem["type"] == "extra_forbidden":
        return f"{where}: {'.'.join(location)} is not a known setting; {_known_name(location)}"
    if problem["type"] == "value_error":
        return f"{where}: {problem['ctx']['error']}"
    if len(location) == 1:
        return f"{where}: {field} = {_shown(problem['input'])} should be a table; write [{field}] with its fields below"
    return f"{where}: {field} = {_shown(problem['input'])} is not allowed; {_expectation(problem)}"


def _known_name(location: list[str]) -> str:
    """The remedy for an unknown key: the closest name in its section, or else in the whole job."""
    sections = _sections()
    if len(location) == 1:
        return nearest(location[0], list(sections))
    section, key = location[0], location[1]
    if len(location) == 3 and (inside := table_fields(f"{section}.{key}")):
        return nearest(location[2], list(inside)).replace("did you mean ", f"did you mean {section}.{key}.", 1)
    if location[:2] == ["data", "fields"] and len(location) == 4:
        return nearest(location[3], list(MediaField.model_fields)).replace(
            "did you mean ", f"did you mean {'.'.join(location[:3])}.", 1
        )
    if elsewhere := [name for name in field_names() if name.endswith(f".{key}")]:
        return f"did you mean {elsewhere[0]}?"
    close = nearest(key, list(sections[section].model_fields))
    return close.replace("did you mean ", f"did you mean {section}.", 1)


def _begun(meaning: str) -> str:
    """A description as part of a sentence: its first one, without a capital."""
    first = " ".join(meaning.split()).split(". ")[0].rstrip(".")
    return first[:1].lower() + first[1:]


def _shown(value: Any) -> str:
    return _shortened(without_secrets(json.dumps(value, default=str)))


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _expectation(problem: dict[str, Any]) -> str:
    message = str(problem["msg"])
    if problem["type"] == "bool_type":
        return "it should be true or false"
    if problem["type"] == "too_short":
        return f"it needs at least {problem['ctx']['min_length']} item"
    if message.startswith("Input should be "):
        return "it should be " + message.removeprefix("Input should be ").replace("a valid integer", "a whole number")
    return message[0].lower() + message[1:]
