"""A DeepSpeed configuration that the Trainer uses: "auto" is what the arguments say, and anything else must match.

As HfTrainerDeepSpeedConfig in transformers does it (5.22): its `fill_match` for every pair below.
"""

import json
from pathlib import Path
from typing import Any

from meshwright.job.convert import Conversion, flat_settings, read_settings
from meshwright.job.from_deepspeed import (
    RULES,
    convert_optimizer,
    convert_precision,
    convert_schedule,
    convert_switches,
    convert_zero,
    gives,
)

_OF_THE_WIDTH = tuple(
    f"zero_optimization.{name}"
    for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
)
"""The Trainer derives these from the model's hidden size; they only move data."""
_CHECKED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
"""Settings that the arguments have already set, once both are known to agree."""


def deepspeed_settings(trainer: Conversion, path: Path, given: Path | None) -> tuple[Conversion, str] | None:
    """The DeepSpeed configuration of these arguments and what errors call it; a path is sought next to their file."""
    value = trainer.take("deepspeed")
    if given is not None:
        return Conversion(read_settings(given)), str(given)
    if not value:
        return None
    if isinstance(value, dict):
        return Conversion(flat_settings(value)), f"{path}: deepspeed"
    for place in (path.parent / value, Path(value)) if isinstance(value, str) else ():
        if _is_file(place):
            return Conversion(read_settings(place)), str(place)
    trainer.refuse("deepspeed", "give the file with --deepspeed", "is not a file next to the arguments or here")
    return None


def _is_file(place: Path) -> bool:
    try:
        return place.is_file()
    except OSError:  # a name longer than any file may have
        return False


def convert_deepspeed(theirs: Conversion, trainer: Conversion, arguments: str, ranks: int, warmup: int) -> None:
    """Resolve a configuration with converted arguments, then convert what only it says."""
    _resolve(theirs, trainer, _arguments(trainer, ranks, warmup), arguments)
    theirs.taken.update(_CHECKED)
    convert_precision(theirs)
    theirs.fields.pop("precision.compute")  # the arguments', which also know tf32
    convert_zero(theirs, ranks)
    if gives(theirs, "optimizer"):
        for field, argument in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
            if theirs.settings.get(f"optimizer.params.{field}") is None:
                theirs.refuse(f"optimizer.params.{field}", f'write "auto" for {argument}, or its value')
        convert_optimizer(theirs)
        if theirs.fields.get("optimizer.weight_decay"):
            theirs.notes.append("weight decay skips norms, biases and vectors; DeepSpeed's optimizer decays all")
    if gives(theirs, "scheduler"):
        convert_schedule(theirs)
    convert_switches(theirs)
    if theirs.take("steps_per_print") is not None:
        theirs.ignored.append("steps_per_print")  # log.every_steps is logging_steps
    theirs.apply(RULES)


def _arguments(trainer: Conversion, ranks: int, warmup: int) -> dict[str, tuple[str, Any]]:
    """Their setting → the arguments it must match, and what these say."""
    fields = trainer.fields
    product = f"per_device_train_batch_size × gradient_accumulation_steps × {ranks} ranks"
    return {
        "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", fields["batch.micro_batch"]),
        "gradient_accumulation_steps": (
            "gradient_accumulation_steps",
            trainer.number("gradient_accumulation_steps", 1),
        ),
        "train_batch_size": (product, fields["batch.global_batch"]),
        "gradient_clipping": ("max_grad_norm", fields["optimizer.clip"]),
        "optimizer.params.lr": ("learning_rate", fields["optimizer.lr"]),
        "optimizer.params.betas": ("[adam_beta1, adam_beta2]", fields["optimizer.betas"]),
        "optimizer.params.eps": ("adam_epsilon", fields["optimizer.eps"]),
        "optimizer.params.weight_decay": ("weight_decay", fields["optimizer.weight_decay"]),
        "scheduler.params.warmup_max_lr": ("learning_rate", fields["optimizer.lr"]),
        "scheduler.params.warmup_num_steps": ("the warm-up", max(1, warmup)),
        "scheduler.params.total_num_steps": ("the number of steps", fields.get("run.steps")),
        "fp16.enabled": ("fp16", fields["precision.compute"] == "fp16"),
        "bf16.enabled": ("bf16", fields["precision.compute"] == "bf16"),
        "seed": ("seed", fields["run.seed"]),
    }


def _resolve(theirs: Conversion, trainer: Conversion, pairs: dict[str, tuple[str, Any]], arguments: str) -> None:
    """Replace every "auto" by the argument it stands for; another value than the argument's is rejected."""
    settings, resolved = theirs.settings, []
    for name, (argument, value) in pairs.items():
        given = settings.get(name)
        if given is None or given == value:
            continue
        if given == "auto":
            resolved.append(name)
        else:
            unsaid = argument.isidentifier() and argument not in trainer.settings
            says = f"{argument} = {json.dumps(value)}{' (its default)' if unsaid else ''}"
            theirs.refuse(name, 'write one value in both, or "auto" here', f"is not {says} of {arguments}")
        settings[name] = value
    if settings.get("scheduler.params.warmup_min_lr") == "auto":
        settings["scheduler.params.warmup_min_lr"] = 0
    for name in [name for name, value in settings.items() if value == "auto"]:
        if name in _OF_THE_WIDTH:
            theirs.ignored.append(name)
        else:
            theirs.refuse(name, "write its value", "is not resolved by the Trainer")
        theirs.taken.add(name)
    if resolved:
        theirs.notes.append(f'"auto" has the value of the arguments, as the Trainer resolves it: {", ".join(resolved)}')
