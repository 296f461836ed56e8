"""Small files next to the weights: tokenizer, chat template, generation settings. None of them is ever executed."""

import json
import shutil
from pathlib import Path
from typing import Any

from meshwright.atomic import disk_refusal
from meshwright.data.tokenizer import load_tokenizer
from meshwright.job import Model, read_hf_config
from meshwright.job.hub import COMPANIONS

KEPT_IN = "huggingface"
"""Where a run folder keeps what came with the weights it started from."""

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def keep_companions(folder: Path, run: Path) -> None:
    """Copy a Hugging Face folder's config and small files into a run folder, which then needs no other."""
    kept = run / KEPT_IN
    try:
        kept.mkdir()
        _copy(folder, kept, ("config.json", *COMPANIONS))
    except OSError as error:
        raise disk_refusal(str(kept), error) or error from error


def write_companions(run: Path, folder: Path, shape: Model) -> None:
    """Give an exported folder its tokenizer and generation settings: those the run started with, or the run's own."""
    if (run / KEPT_IN).is_dir():
        _copy(run / KEPT_IN, folder, COMPANIONS)
    elif (run / "tokenizer.json").is_file():
        _copy(run, folder, ("tokenizer.json",))
        tokenizer = load_tokenizer(run / "tokenizer.json")
        _write(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": tokenizer.decode([tokenizer.end_of_text]),
                "model_max_length": shape.max_sequence_length,
                "clean_up_tokenization_spaces": False,
            },
        )
    if not (folder / "generation_config.json").is_file():
        _write(folder / "generation_config.json", read_token_ids(run))


def read_token_ids(run: Path) -> dict[str, Any]:
    """The special tokens for a config.json; null where there is none, or transformers would put its own defaults."""
    if (run / KEPT_IN).is_dir():
        config = read_hf_config(run / KEPT_IN)
        return {key: config.get(key) for key in _TOKEN_IDS}
    own = run / "tokenizer.json"
    end = load_tokenizer(own).end_of_text if own.is_file() else None
    return dict.fromkeys(_TOKEN_IDS) | {"eos_token_id": end}


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
