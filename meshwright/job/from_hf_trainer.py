"""Hugging Face Trainer arguments (JSON of TrainingArguments, or a command line) as a job: their setting → ours."""

import math
from pathlib import Path
from typing import Any

from meshwright.job.convert import ONE_RANK, Conversion, Converted, read_settings
from meshwright.job.from_deepspeed import gives
from meshwright.job.hf_arguments import RULES
from meshwright.job.hf_deepspeed import convert_deepspeed, deepspeed_settings
from meshwright.job.hf_sft import convert_sft, fill_sft_defaults, is_sft
from meshwright.job.reading import read_settings_text
from meshwright.job.running import Run
from meshwright.job.shell_arguments import arguments_of, read_script, unknowns

_WHOLE = (
    "accelerator_config", "activation_checkpointing_kwargs", "dataset_kwargs", "deepspeed", "fsdp_config",
    "gradient_checkpointing_kwargs", "lr_scheduler_kwargs", "model_init_kwargs",
)  # fmt: skip
ACCELERATOR = {
    "split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": True,
    "non_blocking": False, "gradient_accumulation_kwargs": None, "use_configured_state": False,
}  # fmt: skip
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")


def job_from_hf_trainer(
    path: Path, ranks: int | None = None, *, deepspeed: Path | None = None, examples: int | None = None
) -> Converted:
    """The job of TrainingArguments on this many data-parallel ranks; settings without a counterpart are rejected.

    `deepspeed` is the configuration that the Trainer is given, unless the arguments name it; `examples` is the number
    of training examples, which turns epochs into steps.
    """
    started, settings = _settings(path)
    conversion = Conversion(settings)
    ranks = ranks or started
    if ranks is None:
        ranks = 1
        conversion.notes.append(ONE_RANK)
    sft = is_sft(settings)
    if sft:
        fill_sft_defaults(conversion)
    beside = deepspeed_settings(conversion, path, deepspeed)
    _batch(conversion, ranks)
    epoch = _length(conversion, ranks, examples)
    _precision(conversion, autocast=beside is None)
    _optimizer(conversion)
    if beside is None:
        _sharding(conversion, ranks)
    else:
        conversion.taken.add("fsdp_config")
        if conversion.take("fsdp"):
            conversion.refuse("fsdp", "keep one of them", "contradicts deepspeed")
    if beside is None or not gives(beside[0], "scheduler"):
        _schedule(conversion)
    else:
        _other_schedule(conversion, beside[1])
    _saving(conversion, epoch)
    _watching(conversion, epoch)
    if sft:
        convert_sft(conversion)
    conversion.apply(RULES)
    if beside is not None:
        theirs, name = beside
        convert_deepspeed(theirs, conversion, str(path), ranks, _warmup(conversion))
        conversion.absorb(theirs, name)
    missing = [name for name in ("model.init_from", "batch.sequence_length") if name not in conversion.fields]
    conversion.notes.append(f"not among these arguments, to be set: {', '.join(['data.sources', *missing])}")
    return conversion.finish(str(path))


def _settings(path: Path) -> tuple[int | None, dict[str, Any]]:
    """The arguments in a file, and the ranks that the command in it starts, if it is one."""
    text = read_settings_text(path, "give the arguments as JSON, or the command line that has them")
    if "--" not in text or text.lstrip().startswith(("{", "[")):
        return None, read_settings(path, _WHOLE)
    script = read_script(text, str(path))
    words = {"true": True, "false": False, "none": None}
    settings: dict[str, Any] = {}
    for name, value in arguments_of(script.words).items():
        plain = words.get(value.lower(), value) if isinstance(value, str) else value
        settings[name[2:].replace("-", "_")] = next(iter(unknowns(plain)), plain)
    given = arguments_of(script.launcher[:-1])
    here = next((given[name] for name in ("--nproc-per-node", "--num-processes", "--num-gpus") if name in given), None)
    sizes = [here, given.get("--nnodes", given.get("--num-nodes", 1))]
    return (math.prod(sizes) if all(type(size) is int for size in sizes) else None), settings


def _batch(conversion: Conversion, ranks: int) -> None:
    """per_device_train_batch_size, gradient_accumulation_steps → batch; the seeds; the device."""
    micro = conversion.count("per_device_train_batch_size", 8)
    conversion.fields["batch.micro_batch"] = micro
    conversion.fields["batch.global_batch"] = micro * conversion.count("gradient_accumulation_steps", 1) * ranks
    seed = conversion.take("seed", 42)
    conversion.fields["run.seed"] = seed
    if conversion.take("data_seed") not in (None, seed):
        conversion.refuse("data_seed", "run.seed determines the data order too: remove it")
    if conversion.switch("use_cpu", conversion.switch("no_cuda")):
        conversion.fields["run.device"] = "cpu"


def _length(conversion: Conversion, ranks: int, examples: int | None) -> int | None:
    """max_steps, or else num_train_epochs of so many examples → run.steps; the steps of an epoch if known."""
    fields, drop = conversion.fields, conversion.switch("dataloader_drop_last")
    epochs, steps = conversion.number("num_train_epochs", 3), conversion.number("max_steps", -1)
    epoch = None
    if examples is not None:  # as the Trainer counts: the batches of a rank, then the updates
        together = fields["batch.micro_batch"] * ranks
        batches = examples // together if drop else math.ceil(examples / together)
        epoch = max(1, math.ceil(batches / conversion.count("gradient_accumulation_steps", 1)))
    if steps > 0:
        fields["run.steps"] = steps
    elif epoch is not None:
        fields["run.steps"] = max(1, math.ceil(epochs * epoch))
        conversion.notes.append(
            f"{epochs:g} epochs of {examples} examples are {fields['run.steps']} steps, as the Trainer counts; here "
            "every step is complete, so an epoch may end within one"
        )
    elif {"max_steps", "num_train_epochs"}.isdisjoint(conversion.settings):
        conversion.ours("run.steps")
        fields["run.steps"] = Run().steps
    else:
        name = "num_train_epochs" if "num_train_epochs" in conversion.settings else "max_steps"
        conversion.refuse(
            name,
            'give --examples (the Trainer logs it as "Num examples"), or write max_steps ("Total optimization steps")',
            "leaves the length to the number of examples",
        )
    return epoch


def _sharding(conversion: Conversion, ranks: int) -> None:
    """fsdp and fsdp_config → layout, memory.offload, memory.recompute; neither → replicas (DDP)."""
    given, config = conversion.take("fsdp"), conversion.table("fsdp_config")
    words = given.split() if isinstance(given, str) else list(given) if isinstance(given, list) else []
    config = {key.removeprefix("fsdp_"): value for key, value in config.items()}
    if not given:
        conversion.fields["layout.dp_replicate"] = ranks
        return
    reshard = config.pop("reshard_after_forward", True)
    stage = 2 if "shard_grad_op" in words or reshard in (False, "shard_grad_op") else 3
    for word in words:
        if word not in ("full_shard", "shard_grad_op", "offload", "auto_wrap"):
            conversion.refuse("fsdp", f"{word} needs its two degrees: set layout.dp_replicate and layout.dp_shard")
    if ranks > 1:
        conversion.fields["layout.dp_shard"], conversion.fields["layout.zero"] = ranks, stage
    if "offload" in words or config.pop("cpu_offload", False):
        conversion.fields["memory.offload"] = ["params"]
    if config.pop("activation_checkpointing", False):
        conversion.fields["memory.recompute"] = "full"
    # Each block is its own unit here, and weights are always initialized or loaded in shards.
    for inert in (
        "auto_wrap_policy", "transformer_layer_cls_to_wrap", "cpu_ram_efficient_loading", "sync_module_states",
        "use_orig_params", "state_dict_type", "version", "backward_prefetch", "forward_prefetch", "limit_all_gathers",
    ):  # fmt: skip
        config.pop(inert, None)
    if left := sorted(key for key, value in config.items() if value):
        conversion.refuse("fsdp_config", f"remove {', '.join(left)}")


def _precision(conversion: Conversion, *, autocast: bool) -> None:
    """bf16, fp16, tf32 → precision.compute; activation_checkpointing, once gradient_…, → memory.recompute."""
    bf16, fp16, tf32 = (conversion.switch(name) for name in ("bf16", "fp16", "tf32"))
    if bf16 and fp16:
        conversion.refuse("fp16", "keep one of them", "contradicts bf16")
    compute = "bf16" if bf16 else "fp16" if fp16 else "tf32" if tf32 else "fp32"
    conversion.fields["precision.compute"] = compute
    if autocast and (bf16 or fp16):
        conversion.notes.append(f"{compute} is a working copy of fp32 masters here; the Trainer autocasts operations")
    _recompute(conversion)
    config = conversion.table("accelerator_config")
    if other := [
        key for key, value in config.items() if ACCELERATOR.get(key, value) != value or key not in ACCELERATOR
    ]:
        conversion.refuse("accelerator_config", f"remove {', '.join(other)}")


def _recompute(conversion: Conversion) -> None:
    """activation_checkpointing, or its old name where that is not given, → memory.recompute."""
    old, new = (conversion.switch(f"{name}_checkpointing") for name in ("gradient", "activation"))
    on = old if conversion.settings.get("activation_checkpointing") is None else new
    every = 1
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        kwargs = conversion.table(name)
        kwargs.pop("use_reentrant", None)  # both give the same numbers
        if kwargs.get("offload") is False:
            del kwargs["offload"]
        if type(kwargs.get("every_n_layers")) is int and kwargs["every_n_layers"] > 0:
            every = kwargs.pop("every_n_layers")
        if kwargs:
            conversion.refuse(name, f"remove {', '.join(kwargs)}")
    if on:
        conversion.fields["memory.recompute"] = "full" if every == 1 else {"every": every}


def _optimizer(conversion: Conversion) -> None:
    """optim, adam_beta1, adam_beta2 and what the arguments default to → optimizer."""
    if conversion.take("optim", ADAMW[1]) in ADAMW:
        conversion.fields["optimizer.name"] = "adamw"
    else:
        conversion.refuse("optim", f"use one of {', '.join(ADAMW)}; [optimizer] has others")
    conversion.fields["optimizer.betas"] = [
        conversion.number("adam_beta1", 0.9),
        conversion.number("adam_beta2", 0.999),
    ]
    clip = conversion.take("max_grad_norm", 1.0)
    conversion.fields["optimizer.clip"] = 0.0 if clip is None else conversion.number("max_grad_norm", 1.0)
    theirs = {"lr": 5e-5, "weight_decay": 0.0, "eps": 1e-8}
    conversion.fields.update({f"optimizer.{name}": value for name, value in theirs.items()})


def _schedule(conversion: Conversion) -> None:
    """lr_scheduler_type and kwargs, warmup_steps or warmup_ratio → schedule."""
    steps, warmup = conversion.fields.get("run.steps"), _warmup(conversion)
    kwargs: dict[str, Any] = conversion.table("lr_scheduler_kwargs")
    kind = conversion.take("lr_scheduler_type", "linear")
    fields: dict[str, Any] = {"warmup_steps": warmup}
    if kind in ("constant", "constant_with_warmup"):
        fields |= {"name": "constant"} | ({"warmup_steps": 0} if kind == "constant" else {})
    elif kind == "cosine":
        fields |= {"name": "cosine", "min_lr_ratio": 0.0}
    elif kind == "cosine_with_min_lr":
        fields |= {"name": "cosine", "min_lr_ratio": _floor(conversion, kwargs)}
    elif kind == "linear" and steps:
        fields |= {"name": "wsd", "decay_steps": steps - warmup, "min_lr_ratio": 0.0}
    elif kind == "warmup_stable_decay" and kwargs.pop("decay_type", "cosine") == "linear":
        fields |= {"name": "wsd", "decay_steps": kwargs.pop("num_decay_steps", None), "min_lr_ratio": 0.0}
        kwargs = {
            key: value
            for key, value in kwargs.items()
            if (key, value) not in (("warmup_type", "linear"), ("min_lr_ratio", 0))
        }
    elif kind != "linear":
        conversion.refuse(
            "lr_scheduler_type",
            "use constant, constant_with_warmup, linear, cosine, cosine_with_min_lr, or warmup_stable_decay with a "
            "linear decay_type",
        )
        return
    if kwargs:
        conversion.refuse("lr_scheduler_kwargs", f"remove {', '.join(kwargs)}")
    conversion.fields.update({f"schedule.{name}": value for name, value in fields.items()})
    if fields.get("name") != "constant" or fields["warmup_steps"]:
        conversion.notes.append("the rate of step k is the Trainer's of step k + 1: its first warm-up step has rate 0")


def _warmup(conversion: Conversion) -> int:
    """The steps of warmup_steps, or of its fraction or warmup_ratio of all steps."""
    warmup, ratio = conversion.number("warmup_steps", 0), conversion.number("warmup_ratio", 0.0) or 0.0
    if 0 < warmup < 1 or not warmup:
        warmup = math.ceil(conversion.fields.get("run.steps", 0) * (warmup or ratio))
    return int(warmup)


def _other_schedule(conversion: Conversion, where: str) -> None:
    """Say that the schedule of the arguments has no effect next to another file's."""
    conversion.taken.update(("lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"))
    if (kind := conversion.take("lr_scheduler_type")) is not None:
        conversion.notes.append(f"lr_scheduler_type = {kind}: not used, since the scheduler of {where} is")


def _floor(conversion: Conversion, kwargs: dict[str, Any]) -> float:
    """min_lr_rate, or min_lr over the peak."""
    peak = conversion.settings.get("learning_rate", 5e-5)
    share, lowest = kwargs.pop("min_lr_rate", None), kwargs.pop("min_lr", None)
    try:
        return float(lowest / peak if share is None else share)
    except (ArithmeticError, TypeError, ValueError):
        conversion.refuse("lr_scheduler_kwargs", "write min_lr_rate, a fraction of the peak", "sets no floor")
        return 0.0


def _saving(conversion: Conversion, epoch: int | None) -> None:
    """save_strategy, save_steps, save_total_limit → checkpoint."""
    every = _interval(conversion, "save", conversion.number("save_steps", 500), epoch)
    limit = conversion.number("save_total_limit")
    if every:
        conversion.fields["checkpoint.every_steps"] = every
        kept = {"checkpoint.keep_last": limit} if limit else {"checkpoint.keep_every": every}
        conversion.fields.update(kept)


def _interval(conversion: Conversion, what: str, steps: int | float, epoch: int | None, usual: str = "steps") -> int:
    """Steps between two of these, by its strategy: so many, an epoch, or 0 for never."""
    old = conversion.take("evaluation_strategy", usual) if what == "eval" else usual
    strategy = conversion.take(f"{what}_strategy", old)
    if strategy == "no":
        return 0
    if strategy == "epoch" and epoch is not None:
        return epoch
    if strategy == "epoch":
        conversion.refuse(f"{what}_strategy", "give --examples, or write steps", "depends on the number of examples")
    elif strategy != "steps":
        conversion.refuse(f"{what}_strategy", 'write "steps", "epoch" or "no"')
    elif steps < 1:
        conversion.refuse(f"{what}_steps", "write a number of steps instead of a fraction")
    return int(steps)


def _watching(conversion: Conversion, epoch: int | None) -> None:
    """logging, evaluation and report_to → log, evaluation."""
    every = conversion.number("logging_steps", 500)
    conversion.fields["log.every_steps"] = _interval(conversion, "logging", every, epoch)
    asked = conversion.take("report_to", "none")
    sinks = [sink for sink in (asked if isinstance(asked, list) else [asked]) if sink not in ("none", None)]
    if known := [sink for sink in sinks if sink in ("wandb", "tensorboard", "mlflow")]:
        conversion.fields["log.sinks"] = known
    if len(known) != len(sinks):
        conversion.refuse("report_to", "only wandb, tensorboard and mlflow are supported: name those you use")
    if conversion.take("run_name") not in (None, conversion.settings.get("output_dir")):
        conversion.refuse("run_name", "a run is named by its folder: remove it")
    interval = _interval(conversion, "eval", conversion.number("eval_steps") or every, epoch, usual="no")
    width = conversion.number("per_device_eval_batch_size", 8)
    conversion.fields["evaluation.every_steps"] = interval
    if not interval:
        return
    conversion.notes.append(
        "an evaluation is evaluation.batches × batch.global_batch sequences of held-out text, not all of it"
    )
    if width != conversion.fields["batch.micro_batch"]:
        conversion.refuse("per_device_eval_batch_size", "evaluation uses batch.micro_batch: write the same number")
