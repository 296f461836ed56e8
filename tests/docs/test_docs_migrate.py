"""The migration guides: every field of ours that they name exists, and their tables are what the converters do."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.job import (
    Converted,
    job_fields,
    job_from_deepspeed,
    job_from_hf_trainer,
    job_from_megatron,
    job_from_torchtitan,
)

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = sorted(DOCS.glob("migrate-*.md"))
SECTIONS = "model|data|batch|layout|memory|precision|optimizer|schedule|evaluation|checkpoint|run|log|cluster"
VALUES = {"full_shard", "shard_grad_op", "cosine_with_min_lr", "constant_with_warmup"}  # of settings in these tables
FIELD = re.compile(rf"(?<![\w.])({SECTIONS})\.([a-z_0-9]+)")


def rows(page: Path, until: str = "\0") -> list[list[str]]:
    text = page.read_text(encoding="utf-8").partition(until)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][1:]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_fields_of_ours_exist(page: Path) -> None:
    known = {name for name, _ in job_fields()}
    ours = [code for row in rows(page) for cell in row[1:] for code in codes(cell)]
    named = [".".join(found) for code in ours for found in FIELD.findall(code)]
    assert len(named) > 20 and sorted(set(named) - known) == []
    assert all(len(row) == 3 for row in rows(page))


def test_there_are_six() -> None:
    names = ("deepspeed", "hugging-face", "llm-foundry", "megatron", "modalities", "torchtitan")
    assert [page.stem for page in GUIDES] == [f"migrate-{name}" for name in names]


def test_no_argument_that_the_guide_to_megatron_maps_is_unknown_to_its_converter(tmp_path: Path) -> None:
    page = DOCS / "migrate-megatron.md"
    names = [found for row in rows(page) for code in codes(row[0]) for found in re.findall(r"--[a-z0-9-]+", code)]
    assert len(names) > 60
    for name in names:
        (tmp_path / "args.txt").write_text(f"{name} zzz")
        with pytest.raises(UserError) as caught:
            job_from_megatron(tmp_path / "args.txt")
        assert f'{name} = "zzz" is not a setting known here' not in str(caught.value)


def test_no_setting_that_the_guide_to_torchtitan_maps_is_unknown_to_its_converter(tmp_path: Path) -> None:
    page = DOCS / "migrate-torchtitan.md"
    names = [code for row in rows(page, until="## torchtitan 0.3") for code in codes(row[0])]
    assert len(names) > 40
    for name in names:
        (tmp_path / "titan.toml").write_text(f"{name} = []\nnever.heard = 1")
        with pytest.raises(UserError) as caught:
            job_from_torchtitan(tmp_path / "titan.toml", 1)
        assert "never.heard = 1 is not a setting known here" in str(caught.value)
        assert f"{name} = [] is not a setting known here" not in str(caught.value)


@pytest.mark.parametrize(
    ("guide", "convert"), [("deepspeed", job_from_deepspeed), ("hugging-face", job_from_hf_trainer)]
)
def test_no_setting_that_a_guide_maps_is_unknown_to_its_converter(
    tmp_path: Path, guide: str, convert: Callable[[Path], Converted]
) -> None:
    """A value no setting can have is not refused in the words for unknown settings."""
    names = [code for row in rows(DOCS / f"migrate-{guide}.md") for code in codes(row[0]) if re.search("[._]", code)]
    names = [name for name in names if name not in VALUES]
    assert len(names) > 15
    for name in names:
        (tmp_path / "file.json").write_text(json.dumps(nested(name) | {"never_heard_of": 1}))
        with pytest.raises(UserError) as caught:
            convert(tmp_path / "file.json")
        assert "never_heard_of = 1 is not a setting known here" in str(caught.value)
        assert f"{name} = [] is not a setting known here" not in str(caught.value)


def nested(name: str) -> dict[str, object]:
    head, _, rest = name.partition(".")
    return {head: nested(rest) if rest else []}
