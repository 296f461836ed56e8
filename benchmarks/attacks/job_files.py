"""Real job files, recipes and other programs' settings, damaged or extreme, through commands that write nothing."""

import copy
import json
import random
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from attacks.case import Case, Family, command
from attacks.damage import damaged, mutate, odd_value
from meshwright.job import job_schema

READERS: list[tuple[str, ...]] = [
    ("job", "explain", "FILE", "--json"),
    ("plan", "--check", "FILE", "--json"),
    ("plan", "--check", "FILE", "--cluster", "8x8xh100"),
    ("plan", "--check", "FILE", "--scale", "8,16", "--cluster", "8xh100"),
    ("submit", "FILE", "--site", "vega", "--time", "10", "--dry-run", "--json"),
    ("submit", "FILE", "--site", "leonardo", "--time", "10", "--account", "a", "--ladder", "--dry-run", "--json"),
    ("report", "FILE", "--out", "plan.html", "--force"),
]
SLOW: list[tuple[str, ...]] = [("plan", "--model", "FILE", "--cluster", "8xh100", "--top", "1")]
"""A search takes seconds, many on a busy machine."""
SECONDS = 60.0
DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 50, "warmup_num_steps": 5, "warmup_type": "linear", "cos_min_ratio": 0.1},
    },
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1}, "overlap_comm": True},
    "tensor_parallel": {"autotp_size": 2}, "steps_per_print": 10, "wandb": {"enabled": False},
}  # fmt: skip
MEGATRON = """
GPUS=8; N=$((GPUS * 2)); DIR=${1:-"out"}
ARGS=(--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128  # a comment
  --vocab-size 1000 --micro-batch-size 2 --global-batch-size $N "--lr 1e-3" --attention-dropout 0)
if [ -n "$X" ]; then ARGS+=(--bf16); fi
torchrun --nproc_per_node $GPUS --nnodes `cat n` train.py ${ARGS[@]} \\
  --train-iters 100 --split '949,50,1' --save $DIR > log 2>&1
"""
TRAINER: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-4, "weight_decay": 0.1,
    "adam_beta1": 0.9, "adam_beta2": 0.95, "max_grad_norm": 1.0, "optim": "adamw_torch", "max_steps": 100,
    "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_ratio": 0.1,
    "bf16": True, "fsdp": "full_shard", "fsdp_config": {"min_num_params": 0}, "save_strategy": "steps", "save_steps": 5,
    "eval_strategy": "steps", "eval_steps": 5, "logging_steps": 5, "report_to": [], "seed": 1, "output_dir": "x",
}  # fmt: skip

TITAN: dict[str, Any] = {
    "job": {"dump_folder": "x"}, "metrics": {"log_freq": 5, "enable_wandb": True},
    "model": {"name": "llama3", "flavor": "debugmodel", "converters": ["quantize.linear.float8"]},
    "optimizer": {"name": "AdamW", "lr": 3e-4, "beta1": 0.9}, "lr_scheduler": {"warmup_steps": 5, "decay_ratio": 0.5},
    "training": {"local_batch_size": 4, "seq_len": 128, "steps": 20, "dataset": "c4"},
    "parallelism": {"data_parallel_shard_degree": 2, "pipeline_parallel_degree": 2, "context_parallel_degree": 1},
    "checkpoint": {"enable": True, "interval": 5}, "activation_checkpoint": {"mode": "selective"},
    "validation": {"enable": True, "steps": 3, "freq": 5, "seq_len": 128},
}  # fmt: skip
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("from-deepspeed", DEEPSPEED),
    ("from-hf-trainer", TRAINER),
    ("from-hf-trainer", {**TRAINER, "fsdp": "", "max_length": 64, "packing": True, "deepspeed": DEEPSPEED}),
    ("from-torchtitan", TITAN),
]


def draw(chance: random.Random) -> Iterator[Case]:
    """A damaged job in three of four cases, else another program's settings."""
    from meshwright.job import load_job
    from meshwright.job.presets import recipe_path, recipes

    texts = {name: path.read_text(encoding="utf-8") for name in recipes() if (path := recipe_path(name))}
    whole = load_job("demo").job.model_dump(mode="json")
    number = 0
    while True:
        number += 1
        name = chance.choice(list(texts))
        reader = chance.choice(READERS * 2 + SLOW)
        kind = chance.randrange(11)
        if kind <= 2:
            table: dict[str, Any] = tomllib.loads(texts[name])
            done = [mutate(table, chance) for _ in range(chance.choice([1, 1, 2, 3]))]
            yield Case(
                f"{number} {name}: {', '.join(done)[:60]}",
                partial(_read, reader, _toml(table).encode("utf-8", "surrogatepass")),
            )
        elif kind == 3:
            long = chance.random() < 0.3
            content = _long_keys(chance) if long else damaged(texts[name].encode(), chance)
            yield Case(f"{number} {name}: {'long keys' if long else 'damaged'}", partial(_read, reader, content))
        elif kind == 4:
            table = copy.deepcopy(whole)
            done = [mutate(table, chance) for _ in range(chance.choice([1, 2]))]
            yield Case(f"{number} resolved: {', '.join(done)[:60]}", partial(_resolved, json.dumps(table)))
        elif kind == 5:
            yield Case(f"{number} {name}: --set", partial(_overridden, name, reader, _overrides(whole, chance)))
        elif kind >= 8:
            words, told = _extremes(chance)
            case = partial(_overridden, name, reader, words)
            yield Case(f"{number} {name}: {told[:80]}", case, SECONDS)
        elif chance.random() < 0.3:
            which = chance.choice(["from-megatron", "from-hf-trainer"])
            content = damaged(MEGATRON.encode(), chance)
            yield Case(f"{number} {which}: a damaged script", partial(_theirs, which, content))
        else:
            which, settings = chance.choice(OTHERS)
            theirs = copy.deepcopy(settings)
            done = [mutate(theirs, chance) for _ in range(chance.choice([1, 1, 2]))]
            text = _toml(theirs) if which == "from-torchtitan" else json.dumps(theirs)
            content = text.encode("utf-8", "surrogatepass")
            if chance.random() < 0.2:
                content = damaged(content, chance)
            yield Case(f"{number} {which}: {', '.join(done)[:60]}", partial(_theirs, which, content))


def _extremes(chance: random.Random) -> tuple[list[str], str]:
    """Fields at or near the ends of what the schema allows: the schema accepts them, and what follows must finish."""
    schema = job_schema()
    words, told = [], []
    for _ in range(chance.choice([1, 1, 2, 3])):
        section = chance.choice(["model", "model", "batch", "layout", "memory", *schema["properties"]])
        fields = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]]["properties"]
        field = chance.choice(list(fields))
        kinds = fields[field].get("anyOf", [fields[field]])
        value = _allowed(chance.choice(kinds), chance)
        words += ["--set", f"{section}.{field}={_value(value)}"]
        told.append(f"{section}.{field}={str(value)[:20]}")
    return words, ", ".join(told)


def _allowed(kind: dict[str, Any], chance: random.Random) -> Any:
    if "enum" in kind:
        return chance.choice(kind["enum"])
    if kind.get("type") in ("integer", "number"):
        low = max(kind.get("minimum", kind.get("exclusiveMinimum", 0)), 1 if kind["type"] == "integer" else 1e-300)
        high = kind.get("maximum", kind.get("exclusiveMaximum", 1))
        value = chance.choice([low, high, low * (high / low) ** chance.random()])
        return int(value) if kind["type"] == "integer" else float(value)
    if kind.get("type") == "boolean":
        return chance.random() < 0.5
    if kind.get("type") == "array":
        return [_allowed(kind["items"], chance) for _ in range(chance.randrange(3))] if "items" in kind else [0.5, 0.5]
    return odd_value(chance)


def _overrides(job: dict[str, Any], chance: random.Random) -> list[str]:
    words = []
    for _ in range(chance.choice([1, 2, 3])):
        section = chance.choice(list(job))
        field = chance.choice(list(job[section]))
        value = odd_value(chance)
        text = value if isinstance(value, str) and chance.random() < 0.5 else _value(value)
        words += ["--set", f"{section}.{field}{chance.choice(['', '', '', '.x', '.', '..y'])}={text}"]
    return words


def _long_keys(chance: random.Random) -> bytes:
    """Keys and headers of many names, some deep and some often, which a parser may take the square of."""
    names = chance.choice([1, 2, 15, 17, 1000, 50_000])
    key = chance.choice([".", " . ", ".\t"]).join([chance.choice(["a", "'a'", '"a"', "é", '"\\""'])] * names)
    line = chance.choice(["{} = 1", "[{}]", "[[{}]]", "x{} = 1", "x = {{{} = 1}}", "[b{}]"])
    lines = [
        line.format(f"{number}.{key}" if "b" in line or "x" in line else key) for number in range(200_000 // len(key))
    ]
    return "\n".join(lines)[: chance.choice([100_000, 250_000, 3_000_000])].encode()


def _read(reader: tuple[str, ...], content: bytes, folder: Path) -> None:
    (folder / "job.toml").write_bytes(content)
    command(*("job.toml" if word == "FILE" else word for word in reader))


def _overridden(name: str, reader: tuple[str, ...], words: list[str], folder: Path) -> None:
    reader = reader if reader[0] != "report" else READERS[1]
    command(*(name if word == "FILE" else word for word in reader), *words)


def _resolved(text: str, folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run/job.resolved.json").write_text(text)
    command("job", "explain", "run", "--json")


def _theirs(which: str, content: bytes, folder: Path) -> None:
    (folder / "settings.json").write_bytes(content)
    command("job", which, "settings.json", "--json")


def _toml(table: dict[str, Any]) -> str:
    """Any table as TOML, as far as TOML can express it: null becomes a string."""
    plain = [f"{json.dumps(key)} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    sections = [(key, value) for key, value in table.items() if isinstance(value, dict)]
    for key, value in sections:
        plain += [f"[{json.dumps(key)}]", *(f"{json.dumps(inner)} = {_value(one)}" for inner, one in value.items())]
    return "\n".join(plain) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


JOB_FILES = Family("job files", draw, weight=2.0)
