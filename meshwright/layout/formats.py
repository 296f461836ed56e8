"""Which number formats work with which layouts and shapes, checked before any process starts."""

from meshwright.errors import UserError
from meshwright.job import FORMAT_BYTES, Job

FP8_MULTIPLE = 16
"""The hardware multiplies fp8 matrices whose sides are multiples of this."""


def require_precision(job: Job) -> None:
    """Refuse formats that the layout, the model's shape or other formats rule out."""
    if job.precision.format == "fp16":
        _require_one_decision(job)
    if job.precision.format == "fp8":
        _require_sides(job)
    if gathers_fp8(job):
        _require_fp8_gather(job)
    if job.precision.gradients == "bf16":
        _require_narrow_gradients(job)


def gathers_fp8(job: Job) -> bool:
    """Whether ranks that share the blocks' weights gather them in fp8."""
    return job.precision.fp8_gather and job.precision.format == "fp8" and job.layout.shares_states


def _require_fp8_gather(job: Job) -> None:
    asked, off = "precision.fp8_gather = true", "set precision.fp8_gather = false"
    if job.precision.fp8_scales != "tensor":
        raise UserError(
            f'{asked} sends each weight with one scale, but precision.fp8_scales = "{job.precision.fp8_scales}" has '
            f'more; set precision.fp8_scales = "tensor" or {off}'
        )
    if moved := {"optimizer", "params"} & set(job.memory.offload):
        raise UserError(
            f'{asked} rounds shards on the device, but memory.offload = ["{min(moved)}"] keeps them on the host; {off}'
        )


def _require_one_decision(job: Job) -> None:
    if job.layout.pp > 1 and job.layout.schedule == "pipedream":
        raise UserError(
            'precision.compute = "fp16" skips a step that overflows on all ranks or none, but the stages of '
            'layout.schedule = "pipedream" update independently; set precision.compute = "bf16"'
        )


def _require_sides(job: Job) -> None:
    model, tp = job.model, job.layout.tp
    kv_parts = tp if model.kv_heads % tp == 0 else 1
    sides = {
        "model.width": (model.width, 1),
        "model.heads × model.head_dim": (model.heads * model.head_dim, tp),
        "model.kv_heads × model.head_dim": (model.kv_heads * model.head_dim, kv_parts),
        "model.ffn_width": (model.ffn_width, tp),
        "batch.micro_batch × batch.sequence_length": (job.batch.micro_batch * job.batch.sequence_length, job.layout.cp),
    }
    for name, (size, parts) in sides.items():
        if size // parts % FP8_MULTIPLE:
            share = f"{size}, {size // parts} on a rank," if parts > 1 else f"{size}"
            raise UserError(
                f'precision.compute = "fp8" needs matrices whose sides are multiples of {FP8_MULTIPLE}, but '
                f'{name} = {share} is not; change it or set precision.compute = "bf16"'
            )


def _require_narrow_gradients(job: Job) -> None:
    gradients = 'precision.gradients = "bf16"'
    if job.precision.number_bytes == FORMAT_BYTES["fp32"]:
        raise UserError(
            f'{gradients} is for gradients computed in 16 bits, but precision.compute = "{job.precision.format}" '
            'computes them in 32; set precision.compute = "bf16" or precision.gradients = "fp32"'
        )
    if job.layout.pp > 1 and job.layout.schedule == "pipedream":
        raise UserError(
            f'{gradients} saves nothing with layout.schedule = "pipedream", whose stages use each gradient at once; '
            'set precision.gradients = "fp32"'
        )
    layout, offloaded = job.layout, {"optimizer", "params"} & set(job.memory.offload)
    if offloaded and layout.dp_replicate * layout.dp_shard * layout.tp * layout.cp * layout.pp > 1:
        raise UserError(
            f"{gradients} rounds a gradient as soon as it is reduced, but with memory.offload = "
            f'["{min(offloaded)}"] torch may still be copying it to the host; set precision.gradients = "fp32"'
        )
    if layout.compress != "none":
        raise UserError(
            f'{gradients} would round what layout.compress = "{layout.compress}" keeps exact until it is sent; set '
            'precision.gradients = "fp32"'
        )
