"""Small files next to the weights: tokenizer, chat template, generation settings. None of them is ever executed."""

import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.atomic import disk_refusal
from meshwright.data import Tokenizer
from meshwright.data.chat import CONFIG, TEMPLATE, ChatTemplate, chat_template_in
from meshwright.data.files import read_json
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import UserError
from meshwright.job import Model, read_hf_config
from meshwright.job.hub import COMPANIONS

KEPT_IN = "huggingface"
"""Where a run folder keeps what came with the weights it started from."""

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Generation:
    """What a model's generation settings say that changes which token is the most likely, and which is the last."""

    stop: tuple[int, ...]
    repetition_penalty: float = 1.0


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
    elif (run / TOKENIZER).is_file():
        _copy(run, folder, (TOKENIZER,))
        tokenizer = load_tokenizer(run / TOKENIZER)
        _write(
            folder / CONFIG,
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": tokenizer.decode([tokenizer.end_of_text]),
                "model_max_length": shape.max_sequence_length,
                "clean_up_tokenization_spaces": False,
            }
            | _settings(run / CONFIG),
        )
    _copy(run, folder, (TEMPLATE, GENERATION))  # what the run itself learned takes the place of what it started with
    if not (folder / GENERATION).is_file():
        _write(folder / GENERATION, read_token_ids(run))


def learned_generation(run: Path, tokenizer: Tokenizer, chat: ChatTemplate | None) -> str | None:
    """The generation_config.json of a run that learns to stop where its settings do not say yet; None if they do.

    Training teaches the end of text behind documents, and in conversations what ends the assistant's turns.
    """
    turn = None if chat is None or not chat.is_there else tokenizer.first_control(chat.end_of_turn())
    learned = [token for token in (turn, tokenizer.end_of_text) if token is not None]
    known = _kept_generation(run / KEPT_IN)
    before = _ids(known.get("eos_token_id"), run / KEPT_IN)
    after = list(dict.fromkeys([*before, *learned]))
    if after == before:
        return None
    return _json(dict.fromkeys(_TOKEN_IDS) | known | {"eos_token_id": after if len(after) > 1 else after[0]})


def generation_of(folder: Path, tokenizer: Tokenizer) -> Generation:
    """Where the model of a run or of a Hugging Face folder stops: at the tokens it names, else at the end of text."""
    home = folder if (folder / GENERATION).is_file() or not (folder / KEPT_IN).is_dir() else folder / KEPT_IN
    settings = _kept_generation(home)
    penalty = settings.get("repetition_penalty")
    penalty = 1.0 if penalty is None else penalty
    if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not 0 < penalty < math.inf:
        raise UserError(f"{home / GENERATION}: repetition_penalty = {penalty!r} is not a positive number; correct it")
    stop = _ids(settings.get("eos_token_id"), home)
    return Generation(tuple(stop or [tokenizer.end_of_text]), float(penalty))


def chat_template_of(folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a run or of a Hugging Face folder; that of a run is the one it learned, if it did."""
    own = (folder / TEMPLATE).is_file() or not (folder / KEPT_IN).is_dir()
    return chat_template_in(folder if own else folder / KEPT_IN, tokenizer)


def _kept_generation(folder: Path) -> dict[str, Any]:
    """A folder's generation settings, with the tokens that end a text; without a file its config.json has those."""
    settings = _settings(folder / GENERATION)
    if settings.get("eos_token_id") is None:
        settings |= {"eos_token_id": _settings(folder / "config.json").get("eos_token_id")}
    return settings


def _ids(value: Any, folder: Path) -> list[int]:
    """The tokens that an eos_token_id names: one, several or none."""
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in found):
        raise UserError(
            f"{folder}: eos_token_id = {value!r} is neither a token's number nor a list of them; correct it"
        )
    return list(dict.fromkeys(found))


def _settings(path: Path) -> dict[str, Any]:
    """The settings in a small JSON file; none without one."""
    try:
        found = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); fix or remove it") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__} and no table of settings; fix or remove it")
    return found


def read_token_ids(run: Path) -> dict[str, Any]:
    """The special tokens for a config.json; null where there is none, or transformers would put its own defaults."""
    if (run / KEPT_IN).is_dir():
        config = read_hf_config(run / KEPT_IN)
        return {key: config.get(key) for key in _TOKEN_IDS}
    own = run / TOKENIZER
    end = load_tokenizer(own).end_of_text if own.is_file() else None
    return dict.fromkeys(_TOKEN_IDS) | {"eos_token_id": end}


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(_json(value), encoding="utf-8")


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
