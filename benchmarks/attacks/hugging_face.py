"""Hugging Face folders with a damaged config, safetensors header, index or tokenizer, imported and planned for."""

import atexit
import copy
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from attacks.case import Case, Family, InternalError, Refused, command
from attacks.damage import damaged, mutate, odd_value

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2},
    "mistral": {"sliding_window": 7},
    "qwen2": {"qkv_bias": True, "tied": True},
    "qwen3": {"qk_norm": True, "kv_heads": 1},
    "mixtral": {"experts": {"count": 4, "top_k": 2, "ffn_width": 16}},
    "qwen3_moe": {"qk_norm": True, "experts": {"count": 4, "top_k": 2, "ffn_width": 16, "first_dense": 1}},
    "gpt_oss": {
        "qkv_bias": True, "linear_bias": True, "sinks": True, "sliding_window": 7, "window_layers": "alternate",
        "rope_scaling": {"kind": "yarn", "factor": 4.0},
        "experts": {"count": 4, "top_k": 2, "ffn_width": 16, "swiglu_limit": 7.0},
    },
    "deepseek_v3": {
        "head_dim": 12, "latent": {"kv_rank": 8, "q_rank": 8, "rope_dim": 4, "value_dim": 6},
        "experts": {"count": 8, "top_k": 2, "ffn_width": 16, "shared_width": 16, "first_dense": 1, "scores": "sigmoid"},
    },
    "gpt2": {"norm": "layernorm", "activation": "gelu", "positions": "learned", "qkv_bias": True, "linear_bias": True},
}  # fmt: skip
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
HEADERS = [
    "length",
    "huge length",
    "entry",
    "offsets",
    "overlap",
    "shape",
    "dtype",
    "metadata",
    "bytes",
    "empty",
    "name",
]


@cache
def templates() -> Path:
    """Whole folders of every family, as the product writes them, in one file and in two with an index; created once."""
    root = Path(tempfile.mkdtemp(prefix="attack-templates-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    if (maker := os.fork()) == 0:  # training the tokenizer leaves threads, and no case should be forked with those
        _make(root)
        os._exit(0)
    os.waitpid(maker, 0)
    return root


def _make(root: Path) -> None:
    import torch

    from meshwright.checkpoint.hf_read import parameter_sizes
    from meshwright.checkpoint.tensorfile import Planned, write_safetensors
    from meshwright.data.tokenizer import train_tokenizer
    from meshwright.job import Model, model_to_hf_config
    from meshwright.model import hf_tensors, preference_sizes

    tokenizer = train_tokenizer(["def add(a, b):\n    return a + b\n" * 20], 270)
    for family, fields in SHAPES.items():
        width = {"vocab_size": 270, "width": 32, "layers": 2, "heads": 4, "ffn_width": 64, "max_sequence_length": 64}
        shape = Model.model_validate({**width, **fields})
        sizes = {one.name: one.size for one in hf_tensors(shape, parameter_sizes(shape) | preference_sizes(shape))}
        tensors = {name: Planned.of(name, torch.ones(size)) for name, size in sizes.items()}
        for form in ("one", "two"):
            folder = root / f"{family}-{form}"
            folder.mkdir()
            (folder / CONFIG).write_text(json.dumps(model_to_hf_config(shape), indent=2))
            tokenizer.save(folder / "tokenizer.json")
            if form == "one":
                write_safetensors(folder / SINGLE, list(tensors.values()))
                continue
            names = list(tensors)
            files = {
                name: f"model-0000{1 + 2 * at // len(names)}-of-00002.safetensors" for at, name in enumerate(names)
            }
            for file in sorted(set(files.values())):
                write_safetensors(folder / file, [tensors[name] for name in names if files[name] == file])
            (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))


def draw(chance: random.Random) -> Iterator[Case]:
    """The config in half of the cases, else the weights' headers, the index, or the tokenizer."""
    templates()  # before the cases fork
    number = 0
    while True:
        number += 1
        family, form = chance.choice(list(SHAPES)), chance.choice(["one", "two"])
        what = chance.choice(["config"] * 5 + ["header"] * 4 + ["index" if form == "two" else "header", "tokenizer"])
        how = chance.choice(HEADERS) if what == "header" else chance.choice(["fields", "fields", "fields", "bytes"])
        seed = chance.randrange(2**32)
        reader = chance.choice(["import", "import", "plan", "init_from"]) if what == "config" else "import"
        yield Case(
            f"{number} {family}-{form} {what} {how} {reader}",
            partial(_run, f"{family}-{form}", what, how, seed, reader),
        )


def _run(template: str, what: str, how: str, seed: int, reader: str, folder: Path) -> None:
    chance = random.Random(seed)
    hf = folder / "hf"
    shutil.copytree(templates() / template, hf)
    if what == "header":
        _damage_header(chance.choice(sorted(hf.glob("*.safetensors"))), how, chance)
    else:
        path = hf / {"config": CONFIG, "index": INDEX, "tokenizer": "tokenizer.json"}[what]
        path.write_bytes(_damaged_json(path.read_bytes(), how, chance))
    try:
        if reader == "import":
            command("checkpoint", "import", "hf", "--out", "run", "--json")
        elif reader == "plan":
            command("plan", "--model", "hf/config.json", "--cluster", "1xh100", "--top", "1")
        else:
            words = ["batch.sequence_length=16", 'model.init_from="hf"', 'run.folder="run"']
            command("job", "explain", "demo", "--json", *(word for one in words for word in ("--set", one)))
    except Refused:
        if left := {path.name for path in folder.iterdir()} - {"hf", ".cache"}:
            raise InternalError(f"refused, but {left} was left behind") from None
        raise


def _damaged_json(content: bytes, how: str, chance: random.Random) -> bytes:
    if how == "bytes":
        return damaged(content, chance)
    table = json.loads(content)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        mutate(table, chance)
    return json.dumps(table).encode()


def _damage_header(path: Path, how: str, chance: random.Random) -> None:
    """Damage a safetensors file in the header's offsets."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, rest = json.loads(content[8 : 8 + size]), content[8 + size :]
    name = chance.choice(list(header))
    entry = header[name]
    if how == "bytes":
        path.write_bytes(damaged(content, chance))
        return
    if how == "empty":
        path.write_bytes(content[: chance.randrange(12)])
        return
    if how == "entry":
        header[name] = odd_value(chance)
    elif how == "offsets":
        entry["data_offsets"] = chance.choice([[0, 2**63], [2**64, 0], [-1, 4], [8, 4], [0], [0, 0], "x", [1.5, 2]])
    elif how == "overlap":
        entry["data_offsets"] = copy.deepcopy(header[chance.choice(list(header))]["data_offsets"])
    elif how == "shape":
        entry["shape"] = chance.choice([[2**32, 2**32], [0], [-1], [], [1] * 3000, [2**63], "x", [entry["shape"]]])
    elif how == "dtype":
        entry["dtype"] = chance.choice(["F64", "I8", "BOOL", "F8_E4M3", "X", "", 5, None, "BF16", "C64", "F4"])
    elif how == "metadata":
        header["__metadata__"] = chance.choice([odd_value(chance), {"format": "pt", "x": "y" * 10**6}])
    elif how == "name":
        header[chance.choice(["", "x", "\0", "../x", "k" * 10**5, name + "\n"])] = header.pop(name)
    text = json.dumps(header).encode()
    length = len(text)
    if how == "length":
        length = chance.choice([0, 1, length - 1, length + 1, length + len(rest), length + len(rest) + 1])
    elif how == "huge length":
        length = chance.choice([2**31, 2**40, 2**63 - 1, 2**64 - 1, 100_000_001])
    path.write_bytes(length.to_bytes(8, "little") + text + rest)


HUGGING_FACE = Family("hugging face folders", draw)
