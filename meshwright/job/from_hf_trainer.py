"""Hugging Face Trainer arguments (JSON of TrainingArguments, or a command line) as a job: their setting → ours."""

import math
from pathlib import Path
from typing import Any

from meshwright.job.convert import ANY, ONE_RANK, Conversion, Converted, Field, Noted, Passed, Rule, read_settings
from meshwright.job.reading import read_settings_text
from meshwright.job.running import Run
from meshwright.job.shell_arguments import arguments_of, read_script, unknowns

_WHOLE = ("accelerator_config", "fsdp_config", "lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "deepspeed")
_SAME: dict[str, Rule] = {
    "output_dir": Field("run.folder"),
    "learning_rate": Field("optimizer.lr", float),
    "weight_decay": Field("optimizer.weight_decay", float),
    "adam_epsilon": Field("optimizer.eps", float),
    "full_determinism": Field("run.deterministic"),
    "torch_compile": Field("run.compile"),
    "dataloader_num_workers": Field("data.workers"),
    "dataloader_pin_memory": Field("data.pin_memory"),
}
_ANYTHING = """
do_train do_eval do_predict local_rank remove_unused_columns length_column_name num_train_epochs
dataloader_drop_last dataloader_persistent_workers eval_on_start eval_do_concat_batches eval_use_gather_object
log_level log_level_replica log_on_each_node disable_tqdm logging_first_step logging_nan_inf_filter logging_dir
include_tokens_per_second skip_memory_metrics prediction_loss_only fsdp_transformer_layer_cls_to_wrap
hub_token hub_private_repo hub_strategy push_to_hub_token
"""
"""Script flags, verbosity, the format of results, and what is always the case here: batches are complete, workers live
as long as the run, a run starts with an evaluation; steps take precedence over epochs, and are required."""
_ONLY: dict[str, list[Any]] = {
    "label_names": [None, []],
    "label_smoothing_factor": [0.0],
    "neftune_noise_alpha": [None],
    "optim_args": [None, ""],
    "optim_target_modules": [None],
    "liger_kernel_config": [None],
    "torch_compile_backend": [None, "inductor"],
    "torch_compile_mode": [None, "default"],
    "torch_empty_cache_steps": [None],
    "use_cache": [False],
    "bf16_full_eval": [False],
    "fp16_full_eval": [False],
    "fp16_opt_level": ["O1"],
    "fp16_backend": ["auto"],
    "half_precision_backend": ["auto"],
    "jit_mode_eval": [False],
    "include_num_input_tokens_seen": ["no", False],
    "include_for_metrics": [[]],
    "include_inputs_for_metrics": [False],
    "batch_eval_metrics": [False],
    "eval_delay": [0],
    "eval_accumulation_steps": [None],
    "project": ["huggingface"],
    "trackio_space_id": [None, "trackio"],
    "trackio_bucket_id": [None],
    "trackio_static_space_id": [None],
    "overwrite_output_dir": [False],
    "save_only_model": [False],
    "save_safetensors": [True],
    "save_on_each_node": [False],
    "restore_callback_states_from_checkpoint": [False],
    "metric_for_best_model": [None],
    "greater_is_better": [None],
    "ignore_data_skip": [False],
    "parallelism_config": [None],
    "dataloader_in_order": [True],
    "dataloader_multiprocessing_context": [None],
    "split_batches": [None, False],
    "dispatch_batches": [None],
    "ddp_backend": [None, "nccl", "gloo"],
    "ddp_timeout": [1800],
    "ddp_find_unused_parameters": [None, False],
    "ddp_broadcast_buffers": [None, False],
    "ddp_static_graph": [None, False],
    "fsdp_min_num_params": [0],
    "tpu_num_cores": [None],
    "past_index": [-1],
    "mp_parameters": [""],
    "ray_scope": ["last"],
    "debug": ["", []],
    "torchdynamo": [None],
    "hub_model_id": [None],
    "hub_always_push": [False],
    "hub_revision": [None],
    "push_to_hub_model_id": [None],
    "push_to_hub_organization": [None],
}
"""Settings without a counterpart, and their values (the defaults) that have no effect."""
_INSTEAD: dict[str, Rule] = {
    "average_tokens_across_devices": Passed([True], "the loss is always divided by the valid tokens: remove it"),
    "ddp_bucket_cap_mb": Passed([None], "layout.bucket_mb is the equivalent here"),
    "use_liger_kernel": Passed([False], "kernels are chosen automatically: remove it"),
    "auto_find_batch_size": Passed([False], "use meshwright tune"),
    "train_sampling_strategy": Passed(["random"], 'data.packing = "none" groups by length'),
    "group_by_length": Passed([False], 'data.packing = "none" groups by length'),
    "dataloader_prefetch_factor": Passed([None], "data.prefetch counts steps instead of batches: set that"),
    "resume_from_checkpoint": Passed([None, ""], "use meshwright train --resume"),
    "load_best_model_at_end": Passed([False], "checkpoint.keep_every keeps checkpoints to choose from"),
    "enable_jit_checkpoint": Passed([False], "a signal always saves a checkpoint here: remove it"),
    "push_to_hub": Passed([False], "checkpoint export writes a folder for the hub"),
    "deepspeed": Passed([None], "convert that file with meshwright job from-deepspeed"),
}
_KERNELS = "attention runs on the fastest kernel that fits, measured at the start; none keeps the whole matrix"
_SCRIPT: dict[str, Rule] = {
    **dict.fromkeys(("model_name", "model_name_or_path", "model_id"), Field("model.init_from")),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "max_length", "block_size"), Field("batch.sequence_length")),
    **dict.fromkeys(("attn_implementation", "use_flash_attention_2", "use_flash_attn"), Noted(_KERNELS)),
    **dict.fromkeys(("torch_dtype", "dtype"), Noted("master weights are fp32, and precision.compute is what runs")),
    **dict.fromkeys(
        ("dataset_name", "dataset_config_name", "train_file", "validation_file", "data_path"),
        Noted("set data.sources to the files"),
    ),
    "trust_remote_code": Passed([False], "code that comes with a model is never run: use a supported model"),
}
"""What scripts around the Trainer add to its arguments."""
RULES: dict[str, Rule] = {
    **_SCRIPT,
    **_SAME,
    **{name: Passed(ANY) for name in _ANYTHING.split()},
    **{name: Passed(values) for name, values in _ONLY.items()},
    **_INSTEAD,
}
ACCELERATOR = {
    "split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": True,
    "non_blocking": False, "gradient_accumulation_kwargs": None, "use_configured_state": False,
}  # fmt: skip
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")


def job_from_hf_trainer(path: Path, ranks: int | None = None) -> Converted:
    """The job of TrainingArguments on this many data-parallel ranks; settings without a counterpart are rejected."""
    started, settings = _settings(path)
    conversion = Conversion(settings)
    ranks = ranks or started
    if ranks is None:
        ranks = 1
        conversion.notes.append(ONE_RANK)
    _batch(conversion, ranks)
    _sharding(conversion, ranks)
    _precision(conversion)
    _optimizer(conversion)
    _schedule(conversion)
    _saving(conversion)
    _watching(conversion)
    conversion.apply(RULES)
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
    sizes = [given.get("--nproc-per-node", given.get("--num-processes")), given.get("--nnodes", 1)]
    return (math.prod(sizes) if all(type(size) is int for size in sizes) else None), settings


def _batch(conversion: Conversion, ranks: int) -> None:
    """per_device_train_batch_size, gradient_accumulation_steps → batch; max_steps → run.steps; the seeds."""
    micro = conversion.number("per_device_train_batch_size", 8)
    conversion.fields["batch.micro_batch"] = micro
    conversion.fields["batch.global_batch"] = micro * conversion.number("gradient_accumulation_steps", 1) * ranks
    if {"max_steps", "num_train_epochs"}.isdisjoint(conversion.settings):
        conversion.ours("run.steps")
        conversion.fields["run.steps"] = Run().steps
    elif (steps := conversion.number("max_steps", -1)) > 0:
        conversion.fields["run.steps"] = steps
    else:
        conversion.refuse("max_steps", "write the number of steps", "leaves the length to the number of epochs")
    seed = conversion.take("seed", 42)
    conversion.fields["run.seed"] = seed
    if conversion.take("data_seed") not in (None, seed):
        conversion.refuse("data_seed", "run.seed determines the data order too: remove it")
    if conversion.switch("use_cpu", conversion.switch("no_cuda")):
        conversion.fields["run.device"] = "cpu"


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


def _precision(conversion: Conversion) -> None:
    """bf16, fp16, tf32 → precision.compute; gradient_checkpointing → memory.recompute."""
    bf16, fp16, tf32 = (conversion.switch(name) for name in ("bf16", "fp16", "tf32"))
    if bf16 and fp16:
        conversion.refuse("fp16", "keep one of them", "contradicts bf16")
    compute = "bf16" if bf16 else "fp16" if fp16 else "tf32" if tf32 else "fp32"
    conversion.fields["precision.compute"] = compute
    if bf16 or fp16:
        conversion.notes.append(f"{compute} is a working copy of fp32 masters here; the Trainer autocasts operations")
    if conversion.switch("gradient_checkpointing"):
        conversion.fields["memory.recompute"] = "full"
    kwargs = conversion.table("gradient_checkpointing_kwargs")
    kwargs.pop("use_reentrant", None)  # both give the same numbers
    if kwargs:
        conversion.refuse("gradient_checkpointing_kwargs", f"remove {', '.join(kwargs)}")
    config = conversion.table("accelerator_config")
    if other := [
        key for key, value in config.items() if ACCELERATOR.get(key, value) != value or key not in ACCELERATOR
    ]:
        conversion.refuse("accelerator_config", f"remove {', '.join(other)}")


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
    steps = conversion.fields.get("run.steps")
    kwargs: dict[str, Any] = conversion.table("lr_scheduler_kwargs")
    warmup, ratio = conversion.number("warmup_steps", 0), conversion.number("warmup_ratio", 0.0) or 0.0
    if 0 < warmup < 1 or not warmup:
        warmup = math.ceil((steps or 0) * (warmup or ratio))
    kind = conversion.take("lr_scheduler_type", "linear")
    fields: dict[str, Any] = {"warmup_steps": int(warmup)}
    if kind in ("constant", "constant_with_warmup"):
        fields |= {"name": "constant"} | ({"warmup_steps": 0} if kind == "constant" else {})
    elif kind == "cosine":
        fields |= {"name": "cosine", "min_lr_ratio": 0.0}
    elif kind == "cosine_with_min_lr":
        fields |= {"name": "cosine", "min_lr_ratio": _floor(conversion, kwargs)}
    elif kind == "linear" and steps:
        fields |= {"name": "wsd", "decay_steps": steps - int(warmup), "min_lr_ratio": 0.0}
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


def _floor(conversion: Conversion, kwargs: dict[str, Any]) -> float:
    """min_lr_rate, or min_lr over the peak."""
    peak = conversion.settings.get("learning_rate", 5e-5)
    share, lowest = kwargs.pop("min_lr_rate", None), kwargs.pop("min_lr", None)
    try:
        return float(lowest / peak if share is None else share)
    except (ArithmeticError, TypeError, ValueError):
        conversion.refuse("lr_scheduler_kwargs", "write min_lr_rate, a fraction of the peak", "sets no floor")
        return 0.0


def _saving(conversion: Conversion) -> None:
    """save_strategy, save_steps, save_total_limit → checkpoint."""
    strategy, every = conversion.take("save_strategy", "steps"), conversion.number("save_steps", 500)
    limit = conversion.number("save_total_limit")
    if strategy == "no":
        return
    if strategy != "steps":
        conversion.refuse("save_strategy", 'checkpoints are saved by steps or minutes here: write "steps" or "no"')
    elif not isinstance(every, int) and every < 1:
        conversion.refuse("save_steps", "write a number of steps instead of a fraction")
    else:
        conversion.fields["checkpoint.every_steps"] = int(every)
        kept = {"checkpoint.keep_last": limit} if limit else {"checkpoint.keep_every": int(every)}
        conversion.fields.update(kept)


def _watching(conversion: Conversion) -> None:
    """logging, evaluation and report_to → log, evaluation."""
    every = conversion.number("logging_steps", 500)
    if conversion.take("logging_strategy", "steps") != "steps":
        conversion.refuse("logging_strategy", 'logging is by steps here: write "steps"')
    elif every < 1:
        conversion.refuse("logging_steps", "write a number of steps instead of a fraction")
    else:
        conversion.fields["log.every_steps"] = int(every)
    asked = conversion.take("report_to", "none")
    sinks = [sink for sink in (asked if isinstance(asked, list) else [asked]) if sink not in ("none", None)]
    if known := [sink for sink in sinks if sink in ("wandb", "tensorboard", "mlflow")]:
        conversion.fields["log.sinks"] = known
    if len(known) != len(sinks):
        conversion.refuse("report_to", "only wandb, tensorboard and mlflow are supported: name those you use")
    if conversion.take("run_name") not in (None, conversion.settings.get("output_dir")):
        conversion.refuse("run_name", "a run is named by its folder: remove it")
    strategy = conversion.take("eval_strategy", conversion.take("evaluation_strategy", "no"))
    interval = conversion.number("eval_steps") or every
    width = conversion.number("per_device_eval_batch_size", 8)
    if strategy == "no":
        conversion.fields["evaluation.every_steps"] = 0
    elif strategy != "steps" or interval < 1:
        conversion.refuse("eval_strategy", 'evaluation is by steps here: write "steps" or "no", and eval_steps')
    else:
        conversion.fields["evaluation.every_steps"] = int(interval)
        conversion.notes.append(
            "an evaluation is evaluation.batches × batch.global_batch sequences of held-out text, not all of it"
        )
        if width != conversion.fields["batch.micro_batch"]:
            conversion.refuse("per_device_eval_batch_size", "evaluation uses batch.micro_batch: write the same number")
