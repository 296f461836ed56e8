"""A DeepSpeed configuration (ds_config.json) as a job: their setting → ours; `hf_deepspeed` shares its parts."""

from pathlib import Path

from meshwright.job.convert import (
    ANY,
    ONE_RANK,
    Conversion,
    Converted,
    Field,
    Ignored,
    Passed,
    Rule,
    read_settings,
    switched_off,
)
from meshwright.job.training import Batch

_CODE = "set memory.recompute in the job"
_ZERO = "zero_optimization"
_MOVES = """
allgather_partitions allgather_bucket_size contiguous_gradients log_trace_cache_warnings overlap_comm
parameter_alignment reduce_bucket_size reduce_scatter round_robin_gradients stage3_max_live_parameters
stage3_max_reuse_distance stage3_module_granularity_threshold stage3_param_persistence_threshold
stage3_prefetch_bucket_size sub_group_size
"""
"""How ZeRO moves data: buckets, overlap, what stays gathered."""

RULES: dict[str, Rule] = {
    # the same under another name
    "gradient_clipping": Field("optimizer.clip", float),
    "steps_per_print": Field("log.every_steps"),
    "seed": Field("run.seed"),
    "data_types.grad_accum_dtype": Field("precision.gradients", lambda name: {"fp32": "fp32", "bf16": "bf16"}[name]),
    # always the case here
    f"{_ZERO}.load_from_fp32_weights": Passed([True], "masters are fp32 in every checkpoint here: remove it"),
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": Passed(ANY),  # `checkpoint export` gathers from any layout
    f"{_ZERO}.ignore_unused_parameters": Passed(ANY),  # a decoder uses all of them
    f"{_ZERO}.elastic_checkpoint": Passed(ANY),  # any layout loads any checkpoint
    f"{_ZERO}.compute_grad_norm": Passed([True], "the norm is always computed: remove it"),
    "zero_allow_untested_optimizer": Passed(ANY),
    "zero_force_ds_cpu_optimizer": Passed(ANY),
    "dataloader_drop_last": Passed(ANY),  # every batch is complete, since a run counts steps
    # only move data, or only report
    **{f"{_ZERO}.{name}": Ignored() for name in _MOVES.split()},
    **dict.fromkeys(("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_allgather"), Ignored()),
    # ZeRO++ and NVMe
    f"{_ZERO}.zero_hpz_partition_size": Passed(
        [1], "layout.dp_replicate gives hybrid sharding, which is something else"
    ),
    f"{_ZERO}.zero_quantized_weights": Passed([False], "weights are sent unquantized here: remove it"),
    f"{_ZERO}.zero_quantized_gradients": Passed([False], "layout.compress compresses between replicas, in another way"),
    "aio": Passed([{}], "NVMe is not used here: remove it"),
    # changes results and is not supported here
    "communication_data_type": Passed([None], "set precision.gradients in the job"),
    "gradient_allreduce_op": Passed(["mean"], "the loss is divided by the valid tokens over all ranks: remove it"),
    "prescale_gradients": Passed([False], "the loss is divided once by the valid tokens: remove it"),
    "gradient_predivide_factor": Passed([1.0], "the loss is divided once by the valid tokens: remove it"),
    "sparse_gradients": Passed([False], "embedding gradients are dense here: remove it"),
    "managed_gradient_accumulation": Passed([True], "accumulation follows from the job: remove it"),
    "activation_checkpointing.partition_activations": Passed([False], "layout.tp with layout.sp shards them instead"),
    "activation_checkpointing.cpu_checkpointing": Passed([False], 'memory.offload = ["activations"] does this here'),
    "activation_checkpointing.contiguous_memory_optimization": Ignored(),
    "activation_checkpointing.number_checkpoints": Passed([None], _CODE),
    "activation_checkpointing.synchronize_checkpoint_boundary": Ignored(),
    "activation_checkpointing.profile": Ignored(),
    "checkpoint.tag_validation": Passed(ANY),
    "checkpoint.load_universal": Passed([False], "any layout loads any checkpoint here: remove it"),
    "checkpoint.use_node_local_storage": Passed([False], "checkpoint.backup_to copies to a second location"),
    "tensor_parallel.preset_model": Passed(ANY),  # the model's own sharding table says how it is split
    "tensor_parallel.tp_overlap_comm": Ignored(),
    "compile.deepcompile": Passed([False], "run.compile compiles every block"),
}
SECTIONS = (
    "amp", "autotuning", "comms_logger", "csv_monitor", "curriculum_learning", "data_efficiency", "eigenvalue",
    "elasticity", "flops_profiler", "hybrid_engine", "progressive_layer_drop", "torch_autocast",
)  # fmt: skip
"""Sections without a counterpart, accepted as long as their `enabled` is false."""
SINKS = ("wandb", "tensorboard")
TOGETHER = "convert this file with the Trainer's arguments (job from-hf-trainer ARGS.json --deepspeed)"
FP16_NOTE = (
    "fp16: the scale starts at 2^16 as in DeepSpeed, but is halved at every overflow (no hysteresis) and doubled "
    "after 2000 steps without one"
)


def job_from_deepspeed(path: Path, ranks: int | None = None) -> Converted:
    """The job of a ds_config.json on this many data-parallel ranks; a setting without a counterpart is an error."""
    conversion = Conversion(read_settings(path))
    conversion.drop_auto(f"unless you {TOGETHER}")
    convert_precision(conversion)
    if conversion.fields["precision.compute"] == "fp32":
        conversion.notes.append("neither bf16 nor fp16 is enabled: precision.compute is fp32")
    ranks = _batch(conversion, ranks)
    convert_zero(conversion, ranks)
    if gives(conversion, "optimizer"):
        convert_optimizer(conversion)
        if conversion.fields.get("optimizer.weight_decay"):
            conversion.notes.append("weight decay skips norms, biases and vectors; in DeepSpeed the script decides")
    else:
        conversion.notes.append("the file sets no optimizer: [optimizer] keeps its defaults")
    if gives(conversion, "scheduler"):
        convert_schedule(conversion)
    else:
        conversion.notes.append("the file sets no scheduler: [schedule] keeps its defaults")
    if conversion.settings.get("gradient_clipping") is None:
        conversion.settings.pop("gradient_clipping", None)
        conversion.ours("optimizer.clip")  # whose default there differs between versions
    missing = [
        "model",
        "data",
        "batch.sequence_length",
        *(["run.steps"] if "run.steps" not in conversion.fields else []),
    ]
    conversion.notes.append(f"{', '.join(missing)} are not in the file; set them")
    convert_switches(conversion)
    conversion.apply(RULES)
    return conversion.finish(str(path))


def gives(conversion: Conversion, section: str) -> bool:
    """Whether the settings have a section of this name with anything in it."""
    return any(name.startswith(f"{section}.") for name in conversion.settings)


def convert_precision(conversion: Conversion) -> None:
    """bf16.enabled and fp16.enabled → precision.compute."""
    bf16 = conversion.switch("bf16.enabled", conversion.switch("bfloat16.enabled", False))
    fp16 = conversion.switch("fp16.enabled", False)
    if bf16 and fp16:
        conversion.refuse("fp16.enabled", "keep one of them", "contradicts bf16")
    for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if conversion.switch(f"bf16.{name}", False):
            conversion.refuse(f"bf16.{name}", "masters are fp32 here; precision.optimizer_states shrinks the moments")
    known = {
        "auto_cast": (False, True), "loss_scale": (0,), "initial_scale_power": (16,), "loss_scale_window": (1000,),
        "hysteresis": (2,), "consecutive_hysteresis": (False,), "min_loss_scale": (1,),
        "fp16_master_weights_and_grads": (False,),
    }  # fmt: skip
    for name, values in known.items():
        given = f"fp16.{name}"
        if not fp16:
            conversion.taken.add(given)  # has an effect only with fp16
        elif conversion.take(given, values[0]) not in values:
            conversion.refuse(given, "the loss scale here has no such setting: remove it")
    if fp16:
        conversion.notes.append(FP16_NOTE)
    conversion.fields["precision.compute"] = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    if bf16 and "data_types.grad_accum_dtype" not in conversion.settings:
        conversion.notes.append('gradients are accumulated in fp32; precision.gradients = "bf16" makes that 16 bits')


def _batch(conversion: Conversion, ranks: int | None) -> int:
    """Two of the three batch sizes and the ranks, or all three → batch.micro_batch, batch.global_batch."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, accumulation = (conversion.number(name) for name in names)
    if ranks is None and not (whole and micro and accumulation):
        conversion.notes.append(ONE_RANK)
    if names[0] not in conversion.settings and names[1] not in conversion.settings:
        micro, whole = _usual_batch(conversion, accumulation, ranks or 1)
    found = whole // (micro * accumulation) if whole and micro and accumulation else ranks or 1
    if not accumulation:
        accumulation = whole // (micro * found) if whole and micro else 1
    if not micro and whole:
        micro = whole // (found * accumulation)
    if not micro:
        conversion.refuse(names[1], "write how many sequences one GPU processes at a time")
        return found
    whole = whole or micro * accumulation * found
    if whole != micro * accumulation * found or (ranks is not None and ranks != found):
        conversion.refuse(
            names[0] if names[0] in conversion.settings else names[1],
            "correct one of them, or --ranks",
            f"does not fit: micro-batch {micro} × accumulation {accumulation} × {ranks or found} ranks is not {whole}",
        )
    conversion.fields["batch.global_batch"], conversion.fields["batch.micro_batch"] = whole, micro
    return found


def _usual_batch(conversion: Conversion, accumulation: int | None, ranks: int) -> tuple[int, int]:
    """Our micro-batch and the smallest global batch that is at least ours and fits the ranks, said in a note."""
    usual = Batch()
    step = usual.micro_batch * ranks
    whole = -(-usual.global_batch // step) * step if accumulation is None else step * accumulation
    conversion.notes.append(
        f"no batch size is given: batch.micro_batch = {usual.micro_batch} is the default here, and "
        f"batch.global_batch = {whole} fits {ranks} rank{'s' * (ranks > 1)}"
    )
    return usual.micro_batch, whole


def convert_zero(conversion: Conversion, ranks: int) -> None:
    """zero_optimization and tensor_parallel → layout and memory.offload."""
    stage = conversion.take(f"{_ZERO}.stage", 0)
    conversion.taken.add(_ZERO)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        conversion.refuse(f"{_ZERO}.stage", "write 0, 1, 2 or 3", "is not a stage")
    elif stage and ranks > 1:
        conversion.fields["layout.dp_shard"], conversion.fields["layout.zero"] = ranks, stage
    else:
        conversion.fields["layout.dp_replicate"] = ranks
    offload = []
    if conversion.switch(f"{_ZERO}.cpu_offload", False):
        offload.append("optimizer")
    for theirs, ours in (("offload_optimizer", "optimizer"), ("offload_param", "params")):
        section = f"{_ZERO}.{theirs}"
        device = conversion.take(f"{section}.device", "none")
        for inert in (
            "nvme_path",
            "buffer_count",
            "buffer_size",
            "max_in_cpu",
            "fast_init",
            "pipeline_read",
            "pipeline_write",
        ):
            conversion.taken.add(f"{section}.{inert}")  # have an effect only with NVMe, which is rejected
        conversion.taken.add(f"{section}.pin_memory")  # host buffers are page-locked here where possible
        if conversion.number(f"{section}.ratio", 1) != 1:
            conversion.refuse(f"{section}.ratio", "the host updates everything that is offloaded: remove it")
        if device == "cpu":
            offload.append(ours)
        elif device not in ("none", None):
            conversion.refuse(f"{section}.device", 'only host memory is supported: write "cpu" or "none"')
    if offload:
        conversion.fields["memory.offload"] = list(dict.fromkeys(offload))
    tensor = conversion.number("tensor_parallel.autotp_size", 0)
    if tensor > 1:
        conversion.fields["layout.tp"], conversion.fields["layout.sp"] = tensor, False


def convert_optimizer(conversion: Conversion) -> None:
    """optimizer.type and its params → optimizer."""
    kind, given = str(conversion.take("optimizer.type", "")), "optimizer.params."
    name = {"adam": "adamw", "adamw": "adamw", "lion": "lion"}.get(kind.lower())
    if name is None:
        conversion.refuse("optimizer.type", "use Adam (with decoupled decay), AdamW or Lion")
        conversion.skip("optimizer.params")
        return
    if not conversion.switch(f"{given}adam_w_mode", True):
        conversion.refuse(f"{given}adam_w_mode", "weight decay is decoupled here: remove it, or the decay")
    for inert in ("torch_adam", "bias_correction", "fused", "foreach"):
        if conversion.take(given + inert, inert == "bias_correction") is not True and inert == "bias_correction":
            conversion.refuse(given + inert, "moments are always bias-corrected: remove it")
    if conversion.switch(f"{given}amsgrad", False):
        conversion.refuse(f"{given}amsgrad", "this variant is not supported: remove it")
    conversion.fields["optimizer.name"] = name
    for field in ("lr", "weight_decay"):
        value = conversion.number(given + field)
        if value is not None:
            conversion.fields[f"optimizer.{field}"] = float(value)
        elif given + field not in conversion.settings:
            conversion.ours(f"optimizer.{field}")  # whose default there differs between implementations
    betas = conversion.take(f"{given}betas", [0.9, 0.999] if name == "adamw" else [0.9, 0.99])
    if not isinstance(betas, list) or not all(isinstance(beta, int | float) for beta in betas):
        conversion.refuse(f"{given}betas", "correct it", "is not a list of two numbers")
    if f"{given}betas" not in conversion.auto:
        conversion.fields["optimizer.betas"] = betas
    if name == "adamw" and f"{given}eps" not in conversion.auto:
        conversion.fields["optimizer.eps"] = float(conversion.number(f"{given}eps", 1e-8))


def convert_schedule(conversion: Conversion) -> None:
    """scheduler.type and its params → schedule."""
    kind, given = str(conversion.take("scheduler.type", "")), "scheduler.params."
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "wsd", "WarmupCosineLR": "cosine"}
    if kind not in kinds:
        conversion.refuse("scheduler.type", f"use one of {', '.join(kinds)}")
        conversion.skip("scheduler.params")
        return
    conversion.fields["schedule.name"] = kinds[kind]
    warmup = conversion.number(f"{given}warmup_num_steps", 1000)
    if f"{given}warmup_num_steps" not in conversion.auto:
        conversion.fields["schedule.warmup_steps"] = warmup
    form = conversion.take(f"{given}warmup_type")
    if form is None and warmup:
        conversion.notes.append("the warm-up is linear here; without a warmup_type DeepSpeed's is logarithmic")
    elif form not in (None, "linear"):
        conversion.refuse(f"{given}warmup_type", 'the warm-up is linear here: write "linear"')
    for lowest in ("warmup_min_lr", "warmup_min_ratio"):
        if conversion.take(given + lowest, 0):
            conversion.refuse(given + lowest, "the warm-up starts at 0 here: write 0")
    usual = None if kind == "WarmupCosineLR" or f"{given}warmup_max_lr" in conversion.auto else 0.001
    peak = conversion.number(f"{given}warmup_max_lr", usual)
    if peak is not None:
        lr = conversion.fields.setdefault("optimizer.lr", float(peak))
        if lr != peak:
            conversion.refuse(f"{given}warmup_max_lr", "write one rate in both", f"is not optimizer.params.lr = {lr}")
    if kind != "WarmupLR":
        total = conversion.number(f"{given}total_num_steps")
        if total is None:
            if f"{given}total_num_steps" not in conversion.settings:
                conversion.refuse(f"{given}total_num_steps", f"write the number of steps, or {TOGETHER}")
            return
        conversion.fields["run.steps"] = total
        if kind == "WarmupDecayLR":
            conversion.fields["schedule.decay_steps"] = total - warmup
        floor = conversion.number(f"{given}cos_min_ratio", 0.0001) if kind == "WarmupCosineLR" else 0.0
        conversion.fields["schedule.min_lr_ratio"] = floor
    conversion.notes.append("rates match DeepSpeed's up to a step or two: here the first step has a rate above 0")


def convert_switches(conversion: Conversion) -> None:
    """Sections with an `enabled`: metric sinks, and sections that are rejected unless off."""
    settings = conversion.settings
    sinks = [sink for sink in SINKS if conversion.switch(f"{sink}.enabled", False)]
    if sinks:
        conversion.fields["log.sinks"] = sinks
    for name in settings:
        section, _, key = name.partition(".")
        if section in (*SECTIONS, *SINKS) and switched_off(settings, section):
            conversion.taken.add(name)
        elif section in SECTIONS and key == "enabled":
            conversion.refuse(name, "switch it off")
            conversion.skip(section)
