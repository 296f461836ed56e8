"""What an encoder of pictures or sound takes: its blocks as those of a decoder of its sizes, and its projector."""

from dataclasses import replace

from meshwright.cost import encoder_shape
from meshwright.job import Job
from meshwright.job.audio import KERNEL, Audio
from meshwright.job.encoder import Encoder
from meshwright.job.vision import CHANNELS, Vision
from meshwright.layout import recomputes_encoder
from meshwright.plan.communication import Wires, all_reduce_s
from meshwright.plan.compute import Work, block_work
from meshwright.plan.groups import Groups
from meshwright.plan.kernels import Device, matmul_s
from meshwright.plan.software import Software


def encoder_work(job: Job, device: Device, software: Software) -> Work:
    """Encoder and projector over the slots of one micro-batch; nothing without them."""
    encoder = job.model.encoder
    if encoder is None:
        return Work()
    block = block_work(_alone(job, encoder), device, software, "full" if recomputes_encoder(job) else "none")
    # Every token sees all of its item, not only those before it.
    doubled = {name: 2.0 * getattr(block, name) for name in ("forward_attention", "backward_attention")}
    work = replace(block, **doubled) * encoder.used_layers
    items = _items(job, encoder)
    work += _entering_work(encoder, items, device)
    if "encoder" not in encoder.train:
        work = Work(work.forward_matmul, work.forward_attention, work.forward_elementwise)
    tokens, width = items * encoder.tokens, job.model.width // job.layout.tp
    projector = _product(device, tokens, width, encoder.width, inputs="encoder" in encoder.train)
    return work + projector + _product(device, tokens, job.model.width, width)


def _entering_work(encoder: Encoder, items: int, device: Device) -> Work:
    """What makes tokens of items, which need no gradient; a convolution takes as long as the product it is."""
    tokens, width = items * encoder.tokens, encoder.width
    if isinstance(encoder, Audio):
        first = _product(device, items * encoder.frames, width, KERNEL * encoder.mels, inputs=False)
        return first + _product(device, tokens, width, KERNEL * width)
    assert isinstance(encoder, Vision)
    return _product(device, tokens, width, CHANNELS * encoder.patch**2, inputs=False)


def encoder_sums_s(job: Job, wires: Wires, groups: Groups) -> tuple[float, float]:
    """What tensor parallelism adds to it, forward and backward: two sums a block, and one of the projector's result."""
    encoder = job.model.encoder
    if encoder is None or job.layout.tp == 1:
        return 0.0, 0.0
    items, each = _items(job, encoder), job.precision.number_bytes
    inside = all_reduce_s(wires, groups.tp, each * items * encoder.computed * encoder.width)
    out = all_reduce_s(wires, groups.tp, each * items * encoder.tokens * job.model.width)
    blocks = 2 * encoder.used_layers * inside
    return blocks + out, (blocks if "encoder" in encoder.train else 0.0) + (out if job.layout.sp else 0.0)


def _items(job: Job, encoder: Encoder) -> int:
    """Slots of a micro-batch, all of which each rank of a sequence encodes."""
    return job.batch.micro_batch * encoder.slots


def _alone(job: Job, encoder: Encoder) -> Job:
    """A decoder as large as the encoder, for which every item is a sequence."""
    every = job.batch.global_batch * encoder.slots  # as many micro-batches a step
    batch = {"micro_batch": _items(job, encoder), "global_batch": every, "sequence_length": encoder.computed}
    return job.model_copy(
        update={
            "model": encoder_shape(encoder),
            "batch": job.batch.model_copy(update=batch),
            "layout": job.layout.model_copy(update={"cp": 1, "sp": False}),
            "data": job.data.model_copy(update={"mask_documents": False}),
        }
    )


def _product(device: Device, rows: int, columns: int, inner: int, *, inputs: bool = True) -> Work:
    return Work(
        forward_matmul=matmul_s(device, rows, columns, inner),
        input_matmul=matmul_s(device, rows, inner, columns, kind="input") if inputs else 0.0,
        weight_matmul=matmul_s(device, columns, inner, rows, kind="weight"),
    )
