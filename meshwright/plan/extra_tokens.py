"""Multi-token prediction: what the blocks of model.extra_tokens take and keep beyond what any block does.

The last stage has them after its layers, and each is followed by another pass through the head. A stage before it sends
no more than without them; the last one looks up tokens itself, in a table of its own where there is a pipeline.
"""

from meshwright.job import Job
from meshwright.plan.compute import Work, embedding_work, head_work, tokens_of
from meshwright.plan.kernels import Device, matmul_s, memory_s
from meshwright.plan.software import Software

_WIDTHS_KEPT = {"eager": 6.0, "fused": 4.0}
"""Hidden states and embedding side by side, both normed, the embedding as it was looked up, and the last norm's input;
a compiler norms them again. By count of the modules."""
_WIDTHS_KEPT_OF_INPUT = 2.0
"""With recomputation: a block's input is twice as wide, and the embedding."""


def extra_work(job: Job, device: Device, software: Software) -> Work:
    """Of all extra tokens what is not a block's: lookup, three norms, the projection that joins two streams, head and
    loss."""
    rows, width = _rows(job), job.model.width
    stream = 2.0 * rows * width
    # Two norms side by side and one after the block, each read and written; the backward reads once more.
    passes, passes_back = (6, 9) if software.fusion == "fused" else (21, 30)
    join = Work(
        forward_matmul=matmul_s(device, rows, width, 2 * width, wide=True),
        forward_elementwise=memory_s(device, passes * stream, 4),
        input_matmul=matmul_s(device, rows, 2 * width, width, wide=True, kind="input"),
        weight_matmul=matmul_s(device, width, 2 * width, rows, wide=True, kind="weight"),
        backward_elementwise=memory_s(device, passes_back * stream, 6),
    )
    each = join + head_work(job, device, software) + embedding_work(job, device)
    return each * job.model.extra_tokens


def extra_bytes(job: Job, software: Software, modes: list[str]) -> float:
    """What the blocks of extra tokens keep of a micro-batch beyond any block; `modes` end with theirs."""
    own = modes[len(modes) - job.model.extra_tokens :]
    widths = sum(_WIDTHS_KEPT[software.fusion] if mode == "none" else _WIDTHS_KEPT_OF_INPUT for mode in own)
    return widths * job.precision.number_bytes * _rows(job) * job.model.width


def restored_bytes(job: Job, software: Software, mode: str) -> float:
    """What recomputing one of those blocks restores beyond any block."""
    if not job.model.extra_tokens or mode == "none":
        return 0.0
    widths = _WIDTHS_KEPT[software.fusion] - _WIDTHS_KEPT_OF_INPUT
    return widths * job.precision.number_bytes * _rows(job) * job.model.width


def waiting_bytes(job: Job) -> float:
    """Gradients that the heads before the last have made in the forward: of the weight, and of their hidden states."""
    vocabulary = -(-job.model.vocab_size // job.layout.tp)
    made = job.precision.number_bytes * job.model.width * (vocabulary + tokens_of(job))
    return float(job.model.extra_tokens * made)


def _rows(job: Job) -> int:
    """Tokens of the stream on a rank."""
    return -(-tokens_of(job) // (job.layout.tp if job.layout.sp else 1))
