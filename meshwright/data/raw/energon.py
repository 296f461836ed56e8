"""Folders that Megatron Energon prepared (.nv-meta): their training shards, and what a sample holds."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshwright.data.files import read_json, read_text
from meshwright.data.raw.local import unreadable
from meshwright.errors import UserError

META = ".nv-meta"
_CRUDE = "CrudeWebdataset"
_TEXTS = {"CaptioningSample": ("caption",), "TextSample": ("text",), "VQASample": ("context", "answers")}
"""Sample types whose text is known, and the fields it is in."""
_SOURCE = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
_BRACES = re.compile(r"\{([^{}]*)\}")
_MOST_SHARDS = 1 << 20


@dataclass(frozen=True)
class EnergonSample:
    """Which endings of a sample's members hold the parts of its text."""

    kind: str
    sources: tuple[tuple[str, tuple[str, ...]], ...]
    """For each part the ending, and the keys inside it if it is JSON."""

    @property
    def endings(self) -> frozenset[str]:
        """Those of all parts."""
        return frozenset(ending for ending, _ in self.sources)

    def cook(self, record: dict[str, Any], text_field: str, talks: bool) -> dict[str, Any]:
        """A record by its endings as one with a text, or as a prompt and its completion."""
        parts = [_first(_value(record, ending, keys)) for ending, keys in self.sources]
        if any(not isinstance(part, str) for part in parts):
            return record
        if self.kind == "VQASample" and talks:
            return {**record, "prompt": parts[0], "completion": parts[1]}
        return {**record, text_field: "\n".join(parts)}


def energon_sample(sources: Sequence[str]) -> EnergonSample | None:
    """What the samples of Energon's folders among the sources hold; None where there is nothing to translate."""
    found = {source: _described(Path(source).expanduser()) for source in sources if is_energon(source)}
    kinds = set(found.values())
    if len(kinds) > 1:
        raise UserError(
            f"data.sources: {' and '.join(list(found)[:2])} hold samples of different types or field maps; give each a "
            "job of its own, or translate them with cook of data.encoder"
        )
    return next(iter(kinds), None)


def is_energon(source: str) -> bool:
    """Whether a source is a folder with Energon's description of shards."""
    return "://" not in source and (Path(source).expanduser() / META / "split.yaml").is_file()


def training_shards(folder: Path) -> list[Path]:
    """The shards of a folder's training split, in the order of its description."""
    path = folder / META / "split.yaml"
    told = _read_yaml(path)
    parts = told.get("split_parts")
    train = parts.get("train") if isinstance(parts, dict) else None
    excluded = told.get("exclude") or []
    if not isinstance(train, list) or not train or not all(isinstance(name, str) for name in [*train, *excluded]):
        raise UserError(f"{path} names no shards for train; run energon prepare again")
    counts = _shard_counts(folder)
    if alone := next((name for name in excluded if name not in counts), None):
        raise UserError(f"{path} excludes {alone}, which is no shard; excluding single samples is not supported")
    names = [name for pattern in train for name in _unfolded(pattern) if name not in excluded]
    if unknown := next((name for name in names if name not in counts), None):
        raise UserError(f"{path} names the shard {unknown}, which .info does not list; run energon prepare again")
    return [folder / name for name in names]


def _described(folder: Path) -> EnergonSample | None:
    path = folder / META / "dataset.yaml"
    if not path.is_file():
        return None
    told = _read_yaml(path)
    kind = told.get("sample_type")
    name = kind.get("__class__") if isinstance(kind, dict) else None
    name = name or told.get("__class__")
    if name == _CRUDE:
        return None
    fields = told.get("field_map")
    if name not in _TEXTS or not isinstance(fields, dict):
        how = "its own sample loader" if name in _TEXTS else f"samples of type {name}"
        raise UserError(
            f"{path} has {how}, which Meshwright does not run; known are {', '.join(_TEXTS)} with a field_map and "
            f"{_CRUDE}: translate others with cook of data.encoder in a copy of the folder without {META}"
        )
    sources = []
    for field in _TEXTS[name]:
        match = _SOURCE.fullmatch(str(fields.get(field)))
        if match is None or field not in fields:
            raise UserError(f"{path} has no usable {field} in its field_map; run energon prepare again")
        sources.append((match[1].lower(), tuple(re.findall(r"\[([^\[\]]+)\]", match[2]))))
    return EnergonSample(name, tuple(sources))


def _value(record: dict[str, Any], ending: str, keys: tuple[str, ...]) -> Any:
    # The keys of a sample's .json are those of the record itself.
    value: Any = record if ending == "json" else record.get(ending)
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _shard_counts(folder: Path) -> dict[str, Any]:
    for name in (".info.json", ".info.yaml"):
        path = folder / META / name
        if path.is_file():
            told = _read_json(path) if name.endswith("json") else _read_yaml(path)
            counts = told.get("shard_counts") if isinstance(told, dict) else None
            if isinstance(counts, dict):
                return counts
    raise UserError(f"{folder / META} has no .info.json with shard_counts; run energon prepare again")


def _read_json(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise unreadable(str(path), error) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        told = yaml.safe_load(read_text(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise unreadable(str(path), error) from error
    if not isinstance(told, dict):
        raise UserError(f"{path} is not what energon prepare writes there; run it again")
    return told


def _unfolded(pattern: str) -> Iterator[str]:
    """The names that a pattern with braces stands for: {000..012} and {a,b}."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    low, dots, high = match[1].partition("..")
    if dots and low.isdigit() and high.isdigit():
        if int(high) - int(low) > _MOST_SHARDS:
            raise UserError(f"the pattern {pattern} stands for more than {_MOST_SHARDS} shards; correct it")
        options: Sequence[str] = [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    else:
        options = match[1].split(",")
    for option in options:
        yield from _unfolded(pattern[: match.start()] + option + pattern[match.end() :])
