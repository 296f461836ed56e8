"""What the backward holds of one block on its way through it."""

from meshwright.job import Job
from meshwright.layout import encoder_bytes, recomputes_encoder
from meshwright.plan.adapters import making_bytes
from meshwright.plan.compute import feedforward_width, products_of, recomputes_swiglu, tokens_of
from meshwright.plan.experts import rows_of
from meshwright.plan.reserve import score_count
from meshwright.plan.software import Software


def in_encoder(job: Job, kept: float, gradients: float) -> dict[str, float]:
    """When the backward has come to the encoder's last block: what passes through it is as wide as in a decoder's, and
    what it recomputes is a block's share of what it would have kept."""
    encoder, each = job.model.encoder, job.precision.number_bytes
    assert encoder is not None
    tokens = job.batch.micro_batch * encoder.slots * encoder.computed
    again = 0.0
    if recomputes_encoder(job):
        whole = encoder_bytes(job.model_copy(update={"memory": job.memory.model_copy(update={"recompute": "none"})}))
        again = (whole - kept) / encoder.used_layers
    return {
        "activations": kept,
        "gradients": gradients,
        "a block's forward recomputed": again,
        "a block's backward": each * tokens * (2.0 * encoder.ffn_width / job.layout.tp + 2.0 * encoder.width),
    }


def passing_bytes(job: Job, software: Software) -> float:
    """Gradients on their way through a block where they are widest: two of the inner width and two of the stream, or
    two of the scores. Where SwiGLU's result is computed again it is there too, with its own gradient and those of gate
    and up: a 1B model's peak on an H200, to 0.02%."""
    each = job.precision.number_bytes
    tokens, tp = tokens_of(job), job.layout.tp
    widths = (4.0, 1.0) if recomputes_swiglu(job, software) else (2.0, 2.0)
    inside = each * tokens * (widths[0] * feedforward_width(job.model) / tp + widths[1] * job.model.width)
    if job.model.experts is not None:
        # Ours frees what it has used: OLMoE's peak on an H200 was in the loss, with less than this in the backward.
        times = 1.0 if software.own else 2.0
        inside = max(inside, each * rows_of(job) * times * (job.model.experts.ffn_width + job.model.width))
    largest = max(columns * inner for _, columns, inner in products_of(job, software))
    stream, inner = each * tokens * job.model.width, each * tokens * feedforward_width(job.model) / tp
    inside = max(inside, making_bytes(job, software, largest, stream, inner))
    return inside if software.attention == "flash" else max(inside, 2.0 * each * score_count(job))


def unwritten_bytes(job: Job, software: Software, mode: str) -> float:
    """What a compiled block that recomputes inside its graph never has at once: two norms' results and a sum. With 1B
    and 32,768 or 65,536 tokens on an H200 it were 3.1 to 3.4 widths, in bf16 and in fp8."""
    inside = software.own and software.fusion == "fused" and mode in ("full", "selective")
    return 3.0 * job.precision.number_bytes * tokens_of(job) * job.model.width if inside else 0.0
