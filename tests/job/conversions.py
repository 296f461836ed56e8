"""What the tests of the converters share: files written and converted, and settings with values they cannot have."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.job import Converted, job_from_deepspeed, job_from_hf_trainer

Settings = dict[str, Any]


def deepspeed(folder: Path, settings: Settings, ranks: int | None = None) -> Converted:
    """The job of a DeepSpeed configuration."""
    (folder / "ds_config.json").write_text(json.dumps(settings))
    return job_from_deepspeed(folder / "ds_config.json", ranks)


def trainer(folder: Path, settings: Settings, ranks: int | None = None, **more: Any) -> Converted:
    """The job of TrainingArguments with a number of steps."""
    (folder / "args.json").write_text(json.dumps({"output_dir": "runs/x", "max_steps": 100, **settings}))
    return job_from_hf_trainer(folder / "args.json", ranks, **more)


def refused(message: UserError) -> list[str]:
    """The sentences of a refusal."""
    return str(message).splitlines()


def changed_leaves(settings: Settings) -> Iterator[Settings]:
    """The settings with one value at a time replaced by things it cannot be."""
    for name, value in settings.items():
        others: list[Any] = [[], "zzz", -1, 0, None, {"a": 1}, True, 1.5, 10**4000, math.inf, math.nan, 1e300, "\0"]
        yield from ({**settings, name: other} for other in others)
        if isinstance(value, dict):
            yield from ({**settings, name: inner} for inner in changed_leaves(value))
