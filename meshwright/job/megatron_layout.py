"""Megatron-LM's arguments on parallelism and memory as fields of [layout] and [memory]."""

from math import prod
from typing import Any

from meshwright.job.convert import Conversion
from meshwright.job.shell_arguments import Script, arguments_of


def convert_layout(conversion: Conversion, script: Script, gpus: int | None) -> int:
    """Tensor, context, pipeline and data parallelism → layout; returns the number of data-parallel ranks."""
    fields = conversion.fields
    degrees = {
        ours: conversion.count(f"--{theirs}-parallel-size", 1)
        for ours, theirs in (("tp", "tensor-model"), ("pp", "pipeline-model"), ("cp", "context"))
    }
    fields.update({f"layout.{name}": size for name, size in degrees.items() if size > 1})
    sequence = conversion.switch("--sequence-parallel")
    if degrees["tp"] > 1:
        fields["layout.sp"] = sequence
    method = conversion.take("--cp-comm-type", "p2p")
    ours = {"p2p": "ring", "a2a": "ulysses", "allgather": "allgather", "all_gather": "allgather"}
    if not isinstance(method, str) or method not in ours:
        conversion.refuse("--cp-comm-type", "use p2p, a2a or allgather for all layers")
    elif degrees["cp"] > 1:
        fields["layout.cp_method"] = ours[method]
    _stages(conversion, degrees["pp"])
    if conversion.switch("--use-tp-pp-dp-mapping") and degrees["pp"] > 1:
        fields["layout.order"] = "dp-outside"
    data = _data_parallel(conversion, script, gpus, prod(degrees.values()))
    instances = conversion.count("--num-distributed-optimizer-instances", 1)
    if data % instances:
        conversion.refuse("--num-distributed-optimizer-instances", "correct it", f"does not divide {data} ranks")
    zero = _zero(conversion)
    if zero and data * degrees["cp"] > 1:
        fields["layout.dp_shard"], fields["layout.zero"] = data // instances, zero
        fields["layout.dp_replicate"] = instances
    else:
        fields["layout.dp_replicate"] = data
    return data


def _stages(conversion: Conversion, ranks: int) -> None:
    """Stages per rank and layers per stage → layout.schedule, layout.virtual_stages, layout.split."""
    layers, fields = conversion.fields["model.layers"], conversion.fields
    per_rank, per_stage, first, last = (
        conversion.count(f"--{name}") if f"--{name}" in conversion.settings else None
        for name in (
            "num-virtual-stages-per-pipeline-rank",
            "num-layers-per-virtual-pipeline-stage",
            "decoder-first-pipeline-num-layers",
            "decoder-last-pipeline-num-layers",
        )
    )
    if ranks == 1:
        return
    if per_stage is not None and layers % (ranks * per_stage):
        conversion.refuse(
            "--num-layers-per-virtual-pipeline-stage", "correct it", f"does not divide {layers} layers on {ranks} ranks"
        )
        return
    stages = per_rank if per_stage is None else layers // (ranks * per_stage)
    if stages is not None and stages > 1:
        fields["layout.schedule"], fields["layout.virtual_stages"] = "interleaved", stages
    ends = [end for end in (first, last) if end is not None]
    if not ends:
        return
    middle, rest = divmod(layers - sum(ends), max(1, ranks - len(ends)))
    if rest or middle < 1 or (stages or 1) > 1:
        name = "first" if first is not None else "last"
        conversion.refuse(f"--decoder-{name}-pipeline-num-layers", "set layout.split, the layers of every stage")
        return
    split = ([] if first is None else [first]) + [middle] * (ranks - len(ends)) + ([] if last is None else [last])
    fields["layout.split"] = split


def _data_parallel(conversion: Conversion, script: Script, gpus: int | None, model_parallel: int) -> int:
    """The GPUs that the launcher starts, over those that share one copy of the model."""
    where = "--gpus"
    if gpus is None:
        given = arguments_of(script.launcher)
        sizes: list[Any] = [given.get("--nproc-per-node"), given.get("--nnodes")]
        if not all(isinstance(size, int) for size in sizes):
            sizes = [script.number("GPUS_PER_NODE", "NPROC_PER_NODE"), script.number("NUM_NODES", "NNODES")]
        gpus = prod(sizes) if all(isinstance(size, int) for size in sizes) else script.number("WORLD_SIZE")
        where = "the launcher's number of GPUs"
    if gpus is None:
        conversion.notes.append(
            f"one copy of the model on {model_parallel} GPUs is assumed: give --gpus if there are more"
        )
        return 1
    if gpus < 1 or gpus % model_parallel:
        conversion.refusals["gpus"] = (
            f"{where} = {gpus} is not a multiple of tensor × pipeline × context = {model_parallel}; give --gpus"
        )
        return 1
    return gpus // model_parallel


def _zero(conversion: Conversion) -> int:
    """The distributed optimizer, FSDP2 or Megatron's FSDP → a ZeRO stage."""
    distributed = conversion.switch("--use-distributed-optimizer")
    torch_fsdp = conversion.switch("--use-torch-fsdp2")
    kept = conversion.switch("--torch-fsdp2-no-reshard-after-forward")
    own_fsdp = conversion.switch("--use-megatron-fsdp") or conversion.switch("--use-custom-fsdp")
    strategy = conversion.word("--data-parallel-sharding-strategy", "no_shard")
    stages = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    if strategy not in stages:
        conversion.refuse("--data-parallel-sharding-strategy", f"use one of {', '.join(stages)}")
        return 0
    if torch_fsdp:
        return 2 if kept else 3
    return stages[strategy] if own_fsdp else int(distributed)


def convert_overlap(conversion: Conversion) -> None:
    """tp-comm-overlap → layout.async_tp, which is the compiler's work here."""
    asked, fields = conversion.switch("--tp-comm-overlap"), conversion.fields
    if not asked or not fields.get("layout.sp"):  # without sequence parallelism it does nothing there
        return
    if fields["precision.compute"] == "fp8":
        conversion.notes.append("--tp-comm-overlap is left out: layout.async_tp is not verified with fp8")
        return
    fields["layout.async_tp"] = fields["run.compile"] = True
    conversion.notes.append("--tp-comm-overlap: layout.async_tp, for which blocks are compiled; GPUs of one node")


def convert_gather(conversion: Conversion) -> None:
    """fp8-param-gather → precision.fp8_gather, where ranks share states in fp8."""
    asked, fields = conversion.switch("--fp8-param-gather"), conversion.fields
    if not asked or fields["precision.compute"] != "fp8" or not fields.get("layout.zero"):
        return
    if "precision.fp8_scales" in fields or "memory.offload" in fields:
        why = "scales of blocks" if "precision.fp8_scales" in fields else "--optimizer-cpu-offload"
        conversion.notes.append(f"--fp8-param-gather is left out: with {why} weights are gathered in bf16")
        return
    fields["precision.fp8_gather"] = True


def convert_memory(conversion: Conversion) -> None:
    """recompute-* and optimizer-cpu-offload → memory."""
    fields = conversion.fields
    kind = conversion.word(
        "--recompute-granularity", "selective" if conversion.switch("--recompute-activations") else None
    )
    method = conversion.word("--recompute-method", "uniform")
    layers = conversion.count("--recompute-num-layers", 1)
    modules = conversion.take("--recompute-modules", "core_attn")
    if kind == "selective":
        fields["memory.recompute"] = "selective"
        conversion.notes.append(
            "selective recomputation drops all that is cheap to compute here, not --recompute-modules"
        )
        if modules not in ("core_attn", ["core_attn"]):
            conversion.refuse("--recompute-modules", "which modules are recomputed is not chosen here: remove it")
    elif kind == "full" and method == "uniform":
        fields["memory.recompute"] = "full" if layers == 1 else {"segments": layers}
    elif kind == "full" and method == "block":
        if layers * fields.get("layout.pp", 1) < fields["model.layers"]:
            remedy = "memory.recompute = {budget_gib = x} recomputes as few blocks as fit: write uniform, then set that"
            conversion.refuse("--recompute-method", remedy)
        fields["memory.recompute"] = "full"
    elif kind is not None:
        conversion.refuse(
            "--recompute-method" if kind == "full" else "--recompute-granularity",
            "use selective, or full with uniform or block",
        )
    if conversion.switch("--optimizer-cpu-offload"):
        fields["memory.offload"] = ["optimizer"]
