"""A torchtitan configuration (0.2, TOML) as a job: their setting → ours."""

import math
import re
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.job.convert import Conversion, Converted, read_toml_settings, switched_off
from meshwright.job.presets import model_preset
from meshwright.job.torchtitan_settings import FLOAT8, MASKED, MODELS, RULES, SCHEDULES, SECTIONS


def job_from_torchtitan(path: Path, gpus: int | None = None) -> Converted:
    """The job of a torchtitan TOML on this many GPUs; a setting without a counterpart is an error.

    Settings that are not given have torchtitan's default, not ours.
    """
    if path.suffix == ".py":
        raise UserError(
            f"{path} is Python, as torchtitan's configurations are since 0.3, and is not run; write the job with the "
            "table in docs/migrate-torchtitan.md"
        )
    conversion = Conversion(read_toml_settings(path))
    conversion.fields |= {"optimizer.clip": 1.0, "log.every_steps": 10}  # their defaults, under the rules' fields
    _model(conversion)
    _data(conversion)
    ranks = _layout(conversion, gpus)
    _batch(conversion, ranks)
    _pipeline(conversion)
    _precision(conversion)
    _memory(conversion)
    _overlap(conversion)
    _optimizer(conversion)
    _schedule(conversion)
    _checkpoint(conversion)
    _validation(conversion, ranks)
    _run(conversion)
    conversion.apply(RULES)
    return conversion.finish(str(path))


def _model(conversion: Conversion) -> None:
    """model.name, model.flavor → model; a flavor's attention → data.mask_documents."""
    name, flavor = conversion.word("model.name", "llama3"), conversion.word("model.flavor", "debugmodel")
    plain = next((flavor.removesuffix(end) for end in MASKED if flavor and flavor.endswith(end)), flavor)
    shape = MODELS.get((str(name), str(plain)))
    if shape is None:
        dense = ", ".join(sorted({family for family, _ in MODELS}))
        sizes = [size for family, size in MODELS if family == name]
        where, remedy = ("model.flavor", f"use one of {', '.join(sizes)}") if sizes else ("model.name", f"use {dense}")
        conversion.refuse(where, f"{remedy}, or write [model] by hand", "is not a model known here")
        return
    conversion.fields |= {f"model.{field}": value for field, value in shape.items()}
    _initial_weights(conversion, shape)
    if plain != flavor:
        conversion.fields["data.mask_documents"] = True


def _initial_weights(conversion: Conversion, given: dict[str, Any]) -> None:
    """How torchtitan draws an embedding: with 1.0, or if it is tied as its head."""
    shape = {**(model_preset(given["preset"]) if "preset" in given else {}), **given}
    if shape.get("tied"):
        conversion.fields["model.embed_std"] = shape["width"] ** -0.5
        return
    conversion.fields["model.embed_std"] = 1.0
    conversion.notes.append("initial weights of the head have a standard deviation of 0.02, in torchtitan 1 / √width")


def _data(conversion: Conversion) -> None:
    """seq_len → batch.sequence_length; the tokenizer's folder and the dataset → data."""
    fields = conversion.fields
    fields["batch.sequence_length"] = length = conversion.count("training.seq_len", 2048)
    given = fields.get("model.max_sequence_length")
    longest = given or model_preset(fields.get("model.preset", "llama-3-8b"))["max_sequence_length"]
    if length > longest:
        fields["model.max_sequence_length"] = length
    folder = conversion.word("model.tokenizer_path") or conversion.word("model.hf_assets_path")
    conversion.taken.update(("model.tokenizer_path", "model.hf_assets_path"))
    if folder is not None and not folder.endswith(".model"):
        fields["data.tokenizer"] = folder if folder.endswith(".json") else f"{folder.rstrip('/')}/tokenizer.json"
    dataset, place = conversion.word("training.dataset", "c4_test"), conversion.word("training.dataset_path")
    if place is not None:
        fields["data.sources"] = [place]
    missing = ["data.sources"] if place is None else []
    missing += ["data.tokenizer"] if "data.tokenizer" not in fields else []
    if missing:
        conversion.notes.append(f"to be set, for the dataset {dataset}: {', '.join(missing)}")


def _layout(conversion: Conversion, gpus: int | None) -> int:
    """The degrees of parallelism → layout; returns the data-parallel ranks."""
    given, fields = "parallelism.", conversion.fields
    replicas = conversion.count(f"{given}data_parallel_replicate_degree", 1)
    tensor, context, stages = (
        conversion.count(f"{given}{name}_parallel_degree", 1) for name in ("tensor", "context", "pipeline")
    )
    others = replicas * tensor * context * stages
    shard = f"{given}data_parallel_shard_degree"
    conversion.settings.setdefault(shard, -1)
    shards = conversion.number(shard, -1)
    if shards == -1 and gpus is not None:
        shards = max(1, gpus // others)
    if not isinstance(shards, int) or shards < 1:
        left = "takes all GPUs that are left" if shards == -1 else "is not a number of ranks"
        conversion.refuse(shard, "give --gpus" if shards == -1 else "correct it", left)
        shards = 1
    if gpus is not None and shards * others != gpus:
        made = f"does not fit: the degrees make {shards * others} ranks for {gpus} GPUs"
        conversion.refuse(shard, "correct one of them", made)
    degrees = {"dp_replicate": replicas, "dp_shard": shards, "tp": tensor, "cp": context, "pp": stages}
    fields |= {f"layout.{name}": degree for name, degree in degrees.items() if degree > 1}
    policy = conversion.word(f"{given}fsdp_reshard_after_forward", "default")
    if policy not in ("default", "always", "never"):
        conversion.refuse(f"{given}fsdp_reshard_after_forward", "write default, always or never")
    if shards * context > 1:
        gathered = policy == "never" or (policy == "default" and stages > 1)
        fields["layout.zero"] = 2 if gathered else 3
    rotation = conversion.word(f"{given}context_parallel_rotate_method", "allgather")
    if rotation not in ("allgather", "alltoall"):
        conversion.refuse(f"{given}context_parallel_rotate_method", "write allgather or alltoall")
    if context > 1:
        fields["layout.cp_method"] = "ring" if rotation == "alltoall" else "allgather"
    return replicas * shards


def _batch(conversion: Conversion, ranks: int) -> None:
    """local_batch_size, global_batch_size and, in a pipeline, its micro-batches → batch."""
    local = conversion.count("training.local_batch_size", 8)
    micro = conversion.count("parallelism.pipeline_parallel_microbatch_size", 1)
    whole = conversion.number("training.global_batch_size", -1)
    conversion.fields["batch.micro_batch"] = micro if "layout.pp" in conversion.fields else local
    conversion.fields["batch.global_batch"] = local * ranks if whole == -1 else whole
    if "layout.pp" in conversion.fields and whole not in (-1, local * ranks):
        conversion.notes.append("the whole batch of a step is one pass through the pipeline, not several in turn")


def _pipeline(conversion: Conversion) -> None:
    """The schedule of a pipeline and its stages → layout."""
    given, fields = "parallelism.pipeline_parallel_", conversion.fields
    stages = fields.get("layout.pp", 1)
    schedule = conversion.word(f"{given}schedule", "1F1B")
    parts = conversion.take("parallelism.module_fqns_per_model_part")
    layers = conversion.number(f"{given}layers_per_stage")
    less = sum(conversion.number(f"{given}{end}_stage_less_layers", 1) for end in ("first", "last"))
    written = conversion.take(f"{given}schedule_csv")
    if stages == 1:
        return
    if written:
        conversion.refuse(f"{given}schedule_csv", "name a schedule instead")
    if schedule not in SCHEDULES:
        conversion.refuse(f"{given}schedule", f"use one of {', '.join(SCHEDULES)}")
        return
    fields["layout.schedule"] = SCHEDULES[schedule]
    if parts is not None:
        split = _split(parts)
        if split is None:
            conversion.refuse("parallelism.module_fqns_per_model_part", "write lists of module names, or remove it")
        fields["layout.split"] = split
    elif layers is not None:
        blocks = fields.get("model.layers") or model_preset(fields.get("model.preset", "llama-3-8b"))["layers"]
        count = math.ceil((blocks + less) / max(1, layers))
        if count % stages:
            conversion.refuse(f"{given}layers_per_stage", "correct it", f"makes {count} stages for {stages} ranks")
        fields["layout.virtual_stages"] = max(1, count // stages)
    if parts is None:
        conversion.notes.append("layers are split over stages by their cost; layout.split sets the numbers")


def _split(parts: Any) -> list[int] | None:
    """The layers of each part of a model, given the names of its modules."""
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        return None
    return [sum(str(name).startswith("layers.") for name in part) for part in parts]


def _precision(conversion: Conversion) -> None:
    """mixed_precision_param, mixed_precision_reduce and the float8 converter → precision."""
    formats = {"bfloat16": "bf16", "float32": "fp32"}
    for setting, field, usual in (("param", "compute", "bfloat16"), ("reduce", "gradients", "float32")):
        name = f"training.mixed_precision_{setting}"
        value = conversion.word(name, usual)
        if value not in formats:
            conversion.refuse(name, f"write one of {', '.join(formats)}")
        conversion.fields[f"precision.{field}"] = formats.get(str(value), "fp32")
    converters = conversion.take("model.converters", [])
    converters = [converters] if isinstance(converters, str) else converters
    if converters not in ([], [FLOAT8]):
        conversion.refuse("model.converters", f"use {FLOAT8} alone, or none")
    recipe, skipped = conversion.word(f"{FLOAT8}.recipe_name"), conversion.take(f"{FLOAT8}.filter_fqns", [])
    emulate, gather = (conversion.switch(f"{FLOAT8}.{name}") for name in ("emulate", "enable_fsdp_float8_all_gather"))
    conversion.skip("quantize")  # has an effect only through a converter
    if converters != [FLOAT8]:
        return
    conversion.fields["precision.compute"] = "fp8"
    if recipe == "rowwise":
        conversion.fields["precision.fp8_scales"] = "row"
        conversion.notes.append("fp8: scales of rows are not rounded to powers of two")
    elif recipe not in (None, "tensorwise"):
        conversion.refuse(f"{FLOAT8}.recipe_name", "all three products are in fp8 here: write tensorwise or rowwise")
    elif gather:
        conversion.fields["precision.fp8_gather"] = True
    if emulate:
        conversion.refuse(f"{FLOAT8}.emulate", "write false")
    if skipped not in ([], ["output"], ["lm_head"], "output"):
        conversion.refuse(
            f"{FLOAT8}.filter_fqns", 'every projection of a block is in fp8 here: write ["output"], or nothing'
        )
    elif not skipped:
        conversion.fields["precision.fp8_head"] = True


def _memory(conversion: Conversion) -> None:
    """activation_checkpoint, enable_cpu_offload, compile → memory, run.compile."""
    given, fields = "activation_checkpoint.", conversion.fields
    mode, option = conversion.word(f"{given}mode", "selective"), conversion.take(f"{given}selective_ac_option", "2")
    conversion.taken.add(f"{given}memory_budget")
    if mode in ("full", "none"):
        fields["memory.recompute"] = mode
    elif mode == "selective" and option == "op":
        fields["memory.recompute"] = "selective"
        conversion.notes.append('"selective" keeps the results of other operations than torchtitan\'s list')
    elif mode == "selective" and re.fullmatch(r"[1-9]\d{0,3}", str(option)):
        fields["memory.recompute"] = {"every": int(str(option))}
    elif mode == "selective":
        conversion.refuse(f"{given}selective_ac_option", 'write "op" or a number of layers')
    else:
        conversion.refuse(f"{given}mode", "memory.recompute = {budget_gib = x} is a budget in GiB: set that instead")
    if conversion.switch("training.enable_cpu_offload"):
        fields["memory.offload"] = ["params"]
    parts = conversion.take("compile.components", ["model", "loss"])
    if conversion.switch("compile.enable") and isinstance(parts, list) and "model" in parts:
        fields["run.compile"] = True


def _overlap(conversion: Conversion) -> None:
    """enable_async_tensor_parallel → layout.async_tp; it is the compiler's work there, too."""
    setting, fields = "parallelism.enable_async_tensor_parallel", conversion.fields
    if not conversion.switch(setting) or "layout.tp" not in fields:
        return
    if fields["precision.compute"] == "fp8":
        conversion.notes.append(f"{setting} is left out: layout.async_tp is not verified with fp8")
    elif not fields.get("run.compile"):
        conversion.refuse(setting, "set compile.enable, or write false", "needs compiled blocks")
    else:
        fields["layout.async_tp"] = True


def _optimizer(conversion: Conversion) -> None:
    """optimizer → optimizer, with torchtitan's defaults."""
    fields = conversion.fields
    kind = conversion.word("optimizer.name", "AdamW")
    usual = {"lr": 8e-4, "eps": 1e-8, "weight_decay": 0.1}
    fields |= {
        f"optimizer.{name}": float(conversion.number(f"optimizer.{name}", value)) for name, value in usual.items()
    }
    fields["optimizer.betas"] = [conversion.number("optimizer.beta1", 0.9), conversion.number("optimizer.beta2", 0.95)]
    if kind != "AdamW" and not (kind == "Adam" and not fields["optimizer.weight_decay"]):
        conversion.refuse("optimizer.name", "use AdamW (or Adam without weight_decay); [optimizer] has others")
    fields["optimizer.name"] = "adamw"
    if fields["optimizer.weight_decay"]:
        conversion.notes.append("weight decay skips norms and other vectors; torchtitan's decays every parameter")


def _schedule(conversion: Conversion) -> None:
    """training.steps and lr_scheduler → run.steps, schedule."""
    given, fields = "lr_scheduler.", conversion.fields
    fields["run.steps"] = steps = conversion.count("training.steps", 10000)
    if conversion.number(f"{given}total_steps", steps) != steps:
        conversion.refuse(f"{given}total_steps", "the decay ends with the run here: write training.steps, or remove it")
    warmup = min(conversion.number(f"{given}warmup_steps", 200), steps)
    ratio, kind = conversion.number(f"{given}decay_ratio"), conversion.word(f"{given}decay_type", "linear")
    rest = steps - warmup
    decay = rest if ratio is None else min(round(steps * ratio), rest)
    fields["schedule.warmup_steps"] = warmup
    fields["schedule.min_lr_ratio"] = float(conversion.number(f"{given}min_lr_factor", 0.0))
    if kind == "linear":
        fields |= {"schedule.name": "wsd", "schedule.decay_steps": decay}
    elif kind == "cosine" and decay == rest:
        fields["schedule.name"] = "cosine"
    elif kind == "cosine":
        conversion.refuse(f"{given}decay_ratio", "a cosine begins after the warm-up here: remove it, or decay linearly")
    else:
        conversion.refuse(f"{given}decay_type", "use linear or cosine")
    if decay:
        conversion.notes.append("the rate of step k of the decay is torchtitan's of step k + 1")


def _checkpoint(conversion: Conversion) -> None:
    """checkpoint → checkpoint, model.init_from."""
    given, fields = "checkpoint.", conversion.fields
    on = conversion.switch(f"{given}enable")
    if not on:
        conversion.skip("checkpoint")  # nothing is saved or loaded there; the end is saved here in any case
        return
    every, kept = conversion.count(f"{given}interval", 500), conversion.number(f"{given}keep_latest_k", 10)
    fields["checkpoint.every_steps"] = every
    fields |= {"checkpoint.keep_last": kept} if kept else {"checkpoint.keep_every": every}
    start, hf = conversion.word(f"{given}initial_load_path"), conversion.switch(f"{given}initial_load_in_hf")
    start = start or (conversion.word("model.hf_assets_path") if hf else None)
    if hf and start is None:
        conversion.refuse(f"{given}initial_load_in_hf", "write initial_load_path", "names no folder")
    elif hf:
        for name in [name for name in fields if name.startswith("model.")]:
            del fields[name]  # the folder has the shape, too
        fields["model.init_from"] = start
    elif start is not None:
        conversion.refuse(f"{given}initial_load_path", "its checkpoints are not read: save a Hugging Face folder")


def _validation(conversion: Conversion, ranks: int) -> None:
    """validation → evaluation; a step there is a local batch of each rank, here a global batch."""
    given, fields = "validation.", conversion.fields
    on = conversion.switch(f"{given}enable")
    every, steps = conversion.count(f"{given}freq", 10), conversion.number(f"{given}steps", -1)
    local, length = conversion.count(f"{given}local_batch_size", 8), conversion.number(f"{given}seq_len", 2048)
    place = conversion.word(f"{given}dataset_path")
    conversion.taken.add(f"{given}dataset")
    fields["evaluation.every_steps"] = every if on else 0
    if not on:
        return
    if place is not None:
        fields["evaluation.sets"] = {"validation": place}
    if steps > 0:
        fields["evaluation.batches"] = math.ceil(steps * local * ranks / max(1, fields["batch.global_batch"]))
    else:
        conversion.notes.append("evaluation.batches limits an evaluation; without steps torchtitan reads all the data")
    if length != fields["batch.sequence_length"]:
        conversion.notes.append(f"evaluation has sequences of batch.sequence_length, not validation.seq_len = {length}")


def _run(conversion: Conversion) -> None:
    """The seed and the sinks of metrics → run, log; sections that must be off."""
    seed = conversion.number("debug.seed")
    if seed is None:
        conversion.notes.append("debug.seed is not given: run.seed is 0 here, and a run can be repeated")
    else:
        conversion.fields["run.seed"] = seed
    sinks = [sink for sink in ("wandb", "tensorboard") if conversion.switch(f"metrics.enable_{sink}")]
    if sinks:
        conversion.fields["log.sinks"] = sinks
    for section in SECTIONS:
        if not switched_off(conversion.settings, section, "enable"):
            conversion.refuse(f"{section}.enable", "switch it off")
        conversion.skip(section)
