"""The layout's arithmetic, checked before any process starts: which degrees fit the ranks and the model."""

from math import prod

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Layout


def axes(layout: Layout) -> dict[str, int]:
    """Mesh axes and their sizes, outermost first."""
    inner = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard}
    rest = {"cp": layout.cp, "tp": layout.tp}
    if layout.order == "dp-outside":
        return {**inner, "pp": layout.pp, **rest}
    return {"pp": layout.pp, **inner, **rest}


def ranks_of(layout: Layout) -> int:
    """How many ranks a layout takes."""
    return prod(axes(layout).values())


def padded_vocabulary(job: Job) -> int:
    """Rows of the embedding table as stored: the next multiple of tp, so that every rank holds as many."""
    tp = job.layout.tp
    return -(-job.model.vocab_size // tp) * tp


def require_layout(job: Job, world_size: int) -> None:
    """Refuse a layout that does not take all ranks, or that the model or the batch cannot be cut by."""
    _require_ranks(job, world_size)
    _require_zero(job.layout)
    _require_tensor(job)


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
    for field, value in (("heads", model.heads), ("ffn_width", model.ffn_width), ("width", model.width)):
        if value % tp:
            raise UserError(f"layout.tp = {tp} does not divide model.{field} = {value}; {_degrees(value)}")
    if model.kv_heads % tp and not job.layout.kv_replicate:
        raise UserError(
            f"layout.tp = {tp} does not divide model.kv_heads = {model.kv_heads}; {_degrees(model.kv_heads)}, or set "
            f"layout.kv_replicate = true to copy them"
        )
    if job.layout.sp and job.batch.sequence_length % tp:
        raise UserError(
            f"layout.tp = {tp} does not divide batch.sequence_length = {job.batch.sequence_length}, which layout.sp "
            f"shards; set layout.sp = false or {_degrees(job.batch.sequence_length)}"
        )


def _degrees(value: int) -> str:
    fitting = [str(degree) for degree in range(1, min(value, 64) + 1) if value % degree == 0]
    return f"set layout.tp to one of {', '.join(fitting)}"
