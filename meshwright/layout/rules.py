"""The layout's arithmetic, checked before any process starts: which degrees fit the ranks and the model."""

import json
from functools import lru_cache
from math import gcd, prod

from meshwright.errors import UserError
from meshwright.job import Adapter, Job, Model
from meshwright.job.adapter import BLOCK
from meshwright.job.devices import Layout
from meshwright.layout.attention import require_attention
from meshwright.layout.encoder import require_encoder_layout
from meshwright.layout.experts import require_experts
from meshwright.layout.formats import require_precision
from meshwright.layout.overlap import require_async_tensor
from meshwright.layout.recompute import require_recompute
from meshwright.layout.stages import require_stages
from meshwright.pipeline import Table, build_table, require_schedule, unchecked_table
from meshwright.registries import OPTIMIZERS


def axes(layout: Layout) -> dict[str, int]:
    """Mesh axes and their sizes, outermost first: as ranks are numbered."""
    data = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard}
    inner = {"cp": layout.cp, "tp": layout.tp}
    if layout.order == "dp-outside":
        return {**data, "pp": layout.pp, **inner}
    return {"pp": layout.pp, **data, **inner}


def table_of(job: Job) -> Table:
    """The order in which the pipeline's ranks run the micro-batches of a step."""
    layout = job.layout
    return _table(layout.schedule, layout.pp, job.accumulation, layout.virtual_stages)


def _unchecked(job: Job) -> Table:
    """Caches refusals too: a search asks for many, and these are not the user's mistakes."""
    layout = job.layout
    return unchecked_table(layout.schedule, layout.pp, job.accumulation, layout.virtual_stages)


def is_asynchronous(job: Job) -> bool:
    """Whether the stages of a pipeline update themselves independently of each other."""
    return job.layout.pp > 1 and job.layout.schedule == "pipedream"


_table = lru_cache(maxsize=16)(build_table)  # a table of many ranks and micro-batches takes seconds to build and check


def ranks_of(layout: Layout) -> int:
    """How many ranks a layout needs."""
    return prod(axes(layout).values())


def padded_vocabulary(job: Job) -> int:
    """Rows of the embedding table as stored: the next multiple of tp, so that every rank holds the same number."""
    tp = job.layout.tp
    return -(-job.model.vocab_size // tp) * tp


def require_layout(job: Job, world_size: int) -> None:
    """Refuse a layout that does not use all ranks, or that does not divide the model or the batch."""
    _require_ranks(job, world_size)
    _require_zero(job.layout)
    _require_tensor(job)
    require_async_tensor(job)
    require_experts(job)
    require_attention(job)
    _require_context(job)
    _require_pipeline(job)
    require_recompute(job, _unchecked(job) if job.layout.pp > 1 else None)
    require_precision(job)
    _require_optimizer(job)
    _require_compression(job)
    _require_offload(job)
    _require_adapter(job)
    require_encoder_layout(job)


def _require_ranks(job: Job, world_size: int) -> None:
    needed = ranks_of(job.layout)
    if needed == world_size:
        return
    plural = "s" if needed > 1 else ""
    degrees = " × ".join(f"{name} {size}" for name, size in axes(job.layout).items() if size > 1) or "one device"
    others = needed // job.layout.dp_shard
    remedy = f"start it with {needed} rank{plural} (--nproc {needed})"
    if world_size % others == 0:
        remedy += f" or set layout.dp_shard = {world_size // others}"
    raise UserError(f"layout is {degrees} = {needed} rank{plural}, but there are {world_size}; {remedy}")


def _require_zero(layout: Layout) -> None:
    if layout.zero_stage == 0 and layout.dp_shard > 1:
        raise UserError(
            f"layout.zero = 0 shards nothing, but layout.dp_shard = {layout.dp_shard}; set layout.zero to 1, 2 or 3, "
            f"or use layout.dp_replicate = {layout.dp_shard * layout.dp_replicate} and layout.dp_shard = 1"
        )


def _require_tensor(job: Job) -> None:
    tp, model = job.layout.tp, job.model
    if tp == 1:
        return
    cut = [("heads", model.heads)]
    if model.experts is None or model.experts.first_dense:
        cut.append(("ffn_width", model.ffn_width))
    for field, value in cut:
        if value % tp:
            raise UserError(f"layout.tp = {tp} does not divide model.{field} = {value}; {_degrees(value)}")
    if model.kv_heads % tp and not job.layout.kv_replicate:
        raise UserError(
            f"layout.tp = {tp} does not divide model.kv_heads = {model.kv_heads}; {_degrees(model.kv_heads)}, or set "
            f"layout.kv_replicate = true to copy them"
        )
    length = job.batch.sequence_length // job.layout.cp
    if job.layout.sp and length % tp:
        share = " / layout.cp" if job.layout.cp > 1 else ""
        raise UserError(
            f"layout.tp = {tp} does not divide batch.sequence_length{share} = {length}, which layout.sp "
            f"shards; set layout.sp = false or {_degrees(length)}"
        )


def most_tensor_parallel(model: Model) -> int:
    """The largest layout.tp that divides what it must divide of a model; every other one divides it."""
    encoder = () if model.encoder is None else (model.encoder.heads, model.encoder.ffn_width)
    return gcd(model.heads, model.ffn_width, model.width, *encoder)


def _require_context(job: Job) -> None:
    cp, tp, model = job.layout.cp, job.layout.tp, job.model
    if cp == 1:
        return
    if job.batch.sequence_length % (2 * cp):
        longer = -(-job.batch.sequence_length // (2 * cp)) * 2 * cp
        raise UserError(
            f"layout.cp = {cp} needs batch.sequence_length to be a multiple of 2·cp = {2 * cp} (each rank holds two "
            f"chunks of it), but it is {job.batch.sequence_length}; set it to {longer} or lower layout.cp"
        )
    if job.layout.cp_method != "ulysses":
        return
    if model.heads // tp % cp:
        of = f" / layout.tp = {model.heads // tp}" if tp > 1 else f" = {model.heads}"
        raise UserError(
            f'layout.cp_method = "ulysses" spreads heads over layout.cp = {cp} ranks, which does not divide '
            f'model.heads{of}; lower layout.cp or set layout.cp_method = "ring"'
        )


def _require_pipeline(job: Job) -> None:
    layout = job.layout
    if layout.pp == 1:
        for field, given in (("virtual_stages", layout.virtual_stages not in (None, 1)), ("split", layout.split)):
            if given:
                value = getattr(layout, field)
                raise UserError(
                    f"layout.{field} = {list(value) if field == 'split' else value} is for pipelines, but layout.pp = "
                    "1; raise layout.pp or leave it out"
                )
        return
    require_schedule(layout.schedule, layout.pp, job.accumulation, layout.virtual_stages)
    if is_asynchronous(job):
        _require_pipedream(job)
    table = _unchecked(job)
    require_stages(job, table.stages // table.parameter_copies)
    if table.splits_backward:
        _require_split_backward(job)


def _require_split_backward(job: Job) -> None:
    """Refuse what torch gets wrong when the backward runs as two halves."""
    layout = job.layout
    if layout.zero_stage == 3:
        raise UserError(
            f"layout.zero = 3 frees parameters between the two halves of a backward that layout.schedule = "
            f'"{layout.schedule}" splits, which makes gradients wrong; set layout.zero = 2 or layout.schedule = "1f1b"'
        )
    if job.run.compiles:
        raise UserError(
            f'run.compile = true hangs with layout.schedule = "{layout.schedule}", which splits the backward in two; '
            f'set run.compile = false or layout.schedule = "1f1b"'
        )


def _require_pipedream(job: Job) -> None:
    schedule = 'layout.schedule = "pipedream"'
    for axis in ("dp_replicate", "dp_shard", "tp", "cp"):
        if (size := getattr(job.layout, axis)) > 1:
            raise UserError(
                f"{schedule} supports layout.pp only, but layout.{axis} = {size}; set it to 1 or "
                'layout.schedule = "1f1b"'
            )
    if job.run.on_bad_step == "rewind" or job.run.spike_score:
        field = "run.spike_score" if job.run.spike_score else 'run.on_bad_step = "rewind"'
        raise UserError(
            f"{schedule} lets every stage update before all have seen the loss, which {field} needs; set "
            'run.on_bad_step = "skip" and run.spike_score = 0'
        )
    if job.accumulation > 1:
        raise UserError(
            f"{schedule} updates after every micro-batch, but batch.micro_batch = {job.batch.micro_batch} makes "
            f"{job.accumulation} of them per step; set batch.micro_batch = {job.batch.global_batch}, as "
            "batch.global_batch is"
        )
    if job.model.tied:
        raise UserError(
            f"{schedule} updates the first and the last stage at different times, so model.tied = true cannot keep "
            'their tables equal; set model.tied = false or layout.schedule = "1f1b"'
        )
    if job.model.extra_tokens:
        raise UserError(
            f"{schedule} updates the first and the last stage at different times, so both cannot keep the same "
            f"embedding, as model.extra_tokens = {job.model.extra_tokens} needs; set model.extra_tokens = 0 or "
            'layout.schedule = "1f1b"'
        )
    if job.run.compiles:
        raise UserError(
            f"{schedule} swaps a block's weights from one mini-batch to the next, which is not verified with "
            "run.compile = true; set run.compile = false"
        )


def _require_compression(job: Job) -> None:
    compress = f'layout.compress = "{job.layout.compress}"'
    if job.layout.compress == "none":
        return
    if job.layout.dp_replicate == 1:
        raise UserError(
            f"{compress} compresses gradients between replicas, but layout.dp_replicate = 1; raise it or set "
            'layout.compress = "none"'
        )
    if job.precision.format == "fp16":
        raise UserError(
            f'{compress} keeps what it does not send for later steps, where precision.compute = "fp16" may scale '
            'gradients differently; set precision.compute = "bf16" or layout.compress = "none"'
        )


def _require_optimizer(job: Job) -> None:
    states = job.precision.optimizer_states
    if job.optimizer.name not in OPTIMIZERS.built_in:
        _require_own_optimizer(job)
    if job.optimizer.name == "adafactor" and states != "fp32":
        raise UserError(
            f'precision.optimizer_states = "{states}" has nothing to shrink, since optimizer.name = "adafactor" keeps '
            'only a row and a column of each matrix; set it to "fp32"'
        )


def _require_own_optimizer(job: Job) -> None:
    name, states, layout = job.optimizer.name, job.precision.optimizer_states, job.layout
    if states != "fp32":
        raise UserError(
            f'precision.optimizer_states = "{states}" is a format of built-in optimizers, and optimizer.name = '
            f'"{name}" keeps states of its own; set it to "fp32"'
        )
    if (layout.tp > 1 or layout.shares_states) and not OPTIMIZERS.find(name).elementwise:
        cut = f"layout.tp = {layout.tp}" if layout.tp > 1 else f"layout.zero = {layout.zero_stage}"
        raise UserError(
            f'optimizer.name = "{name}" needs whole matrices, and {cut} leaves a rank parts of them; use '
            "layout.dp_replicate and layout.pp alone"
        )


def _require_offload(job: Job) -> None:
    shown = f"memory.offload = {list(job.memory.offload)}".replace("'", '"')
    if job.memory.offload and is_asynchronous(job):
        raise UserError(
            f'{shown} does not support the weight versions that layout.schedule = "pipedream" keeps; leave it '
            'out or set layout.schedule = "1f1b"'
        )
    if {"optimizer", "params"} & set(job.memory.offload) and job.layout.compress != "none":
        raise UserError(
            f'{shown} moves gradients off the device before layout.compress = "{job.layout.compress}" can compress '
            'them; set layout.compress = "none" or leave "optimizer" and "params" out of memory.offload'
        )


def _require_adapter(job: Job) -> None:
    if job.model.adapter is None:
        return
    if is_asynchronous(job):
        raise UserError(
            'layout.schedule = "pipedream" keeps versions of all weights, and model.adapter trains only some; set '
            'layout.schedule = "1f1b" or leave model.adapter out'
        )
    if job.precision.format == "fp8":
        raise UserError(
            'precision.compute = "fp8" rounds the products next to which model.adapter is trained; set '
            'precision.compute = "bf16"'
        )
    _require_base(job, job.model.adapter)


def _require_base(job: Job, adapter: Adapter) -> None:
    """A quantised base stays on the device, and its blocks whole on a rank."""
    field, moved = f'model.adapter.base = "{adapter.base}"', {"optimizer", "params"} & set(job.memory.offload)
    if adapter.base != "compute" and moved:
        raise UserError(
            f"{field} stays on the device, which memory.offload = {json.dumps(job.memory.offload)} excludes; leave "
            f'"{min(moved)}" out'
        )
    shape, tp = job.model, job.layout.tp
    for size in (shape.heads * shape.head_dim, shape.ffn_width):
        if adapter.base == "nf4" and size // tp % BLOCK:
            raise UserError(
                f"{field} has blocks of {BLOCK} numbers, which layout.tp = {tp} would split: {size} inputs of a "
                f"projection leave each rank {size // tp}; lower layout.tp"
            )


def _degrees(value: int) -> str:
    fitting = [str(degree) for degree in range(1, min(value, 64) + 1) if value % degree == 0]
    return f"set layout.tp to one of {', '.join(fitting)}"


def casts_from(job: Job) -> int | None:
    """From which micro-batch of a step on, counted from 1, the blocks' weights are kept in fp8.

    None if each casts them: where nothing would be saved, where not all parameters are there between micro-batches, and
    in pipelines.
    """
    first = 1 if ranks_of(job.layout) == 1 else 2
    kept = job.layout.pp == 1 and not {"optimizer", "params"} & set(job.memory.offload)
    kept = kept and (first == 1 or job.layout.zero_stage < 3)
    return first if kept and job.precision.format == "fp8" and job.accumulation > first else None


def updates_in_one_pass(job: Job) -> bool:
    """Whether a job's update on one GPU reads gradients in any format and writes the working copy itself."""
    adamw = job.optimizer.name == "adamw" and job.precision.optimizer_states == "fp32"
    return adamw and job.precision.number_bytes == 2 and ranks_of(job.layout) == 1 and not job.memory.offload


def gradient_format(job: Job) -> str:
    """The format gradients are kept in until the update, as precision.compute or precision.gradients names it.

    With one micro-batch per step nothing is summed: as computed by backward they are as exact as when widened.
    """
    if job.accumulation == 1 and updates_in_one_pass(job):
        return job.precision.format
    return job.precision.gradients
