"""What a block keeps of a micro-batch for its backward: the model's own count, as a layout shards and a program edits
it."""

from functools import lru_cache

from meshwright.job import Job, Model
from meshwright.layout import ranks_of, saved_by_name
from meshwright.plan.compute import feedforward_width, products_of, recomputes_swiglu
from meshwright.plan.experts import ROUTED, imbalance
from meshwright.plan.reserve import score_count
from meshwright.plan.software import Software


def block_bytes(job: Job, software: Software, mode: str) -> tuple[float, float]:
    """Bytes a block keeps of a micro-batch, and those its recomputation restores at once."""
    whole = _edited(job, software, sizes_of(job, "none"))
    if mode == "none":
        return sum(whole.values()), 0.0
    if mode == "selective" and software.selective == "attention":
        dropped = sum(whole.pop(name, 0.0) for name in ("attention.scores",))
        return sum(whole.values()), dropped
    kept = sizes_of(job, mode)
    if mode in ("segment", "joined"):  # a compiled block saves for a segment what it would save without recomputation
        return sum(kept.values()), sum(whole.values()) - sum(kept.values())
    if software.own:
        # Inputs of its kernels are recomputed; a compiler that sees what is kept computes the rest inside of them.
        again = _without_swiglu(job, software, sizes_of(job, "none")) if mode == "full" else whole
        return sum(kept.values()), sum(again.values()) - sum(kept.values())
    if mode == "selective" and software.selective == "half":
        # Of every two projections' results the second is dropped: k, the attention's and up; the last one's is kept.
        for name in ("attention.k", "attention.projected", "ffn.up"):
            kept.pop(name, None)
        kept["ffn.projected"] = kept["input"]
    return sum(kept.values()), sum(whole.values())


_CAST = {"attention.input", "ffn.input", "ffn.product", "shared.input", "shared.product", "moe.rows", "moe.product"}
"""Inputs of products, which fp8 keeps as it cast them."""


def _edited(job: Job, software: Software, sizes: dict[str, float]) -> dict[str, float]:
    """The saved tensors of a program that fuses, gathers again or writes scores out."""
    edited = _without_swiglu(job, software, sizes)
    if software.fusion == "fused" and software.fused_gate and job.model.activation == "swiglu":
        for name in ("ffn", "shared", "moe"):  # recomputed from gate and up inside the fused kernel's backward
            edited.pop(f"{name}.activated", None)
    for name in ROUTED if software.stashes else {"moe.out"} if software.weighted_inside else ():
        edited.pop(name, None)
    for name in ROUTED & edited.keys():
        edited[name] *= imbalance(job)
    if software.own and software.fusion == "fused" and job.layout.tp == 1 and job.model.latent is None:
        # Values are part of the one product that queries and keys were part of, and keep it whole: queries and keys as
        # they were computed with it. Not so if they are copied, and for the kernel of windows and documents.
        together = sum(sizes[f"attention.{name}"] for name in "qk")
        if not software.lean_blocks or job.model.positions != "rope" or job.model.qk_norm:
            edited["attention.v"] += (1.0 - _apart(job)) * together
        for name in ("attention.q_norm.input", "attention.k_norm.input"):
            edited.pop(name, None)
        if job.model.positions != "rope" and not job.model.qk_norm:
            del edited["attention.q"], edited["attention.k"]
        edited["weights side by side"] = side_by_side(job, software)
        if job.precision.format == "fp8":
            _cast_inputs(job, edited)
    if not software.own and software.fp8_scales == "delayed" and job.precision.format == "fp8":
        # Transformer Engine keeps the inputs of products as it cast them.
        for name in _CAST & edited.keys():
            edited[name] /= 2
        edited["attention.out"] = edited.get("attention.out", 0.0) * 1.5
    if software.regather and job.layout.sp:
        for name in {"attention.input", "ffn.input", "shared.input"} & edited.keys():
            edited[name] /= job.layout.tp
    if software.attention == "fused-softmax":
        edited["attention.scores"] = score_count(job) * (5.0 if job.model.dropout > 0 else 2.0)
    return edited


def _cast_inputs(job: Job, sizes: dict[str, float]) -> None:
    """With one scale a tensor inputs of products are kept in 8 bits, that of the attention's projection in addition to
    its result. Finer scales cast them again in the backward, and the compiler computes all but the rows of experts from
    what is kept."""
    if job.precision.fp8_scales == "tensor":
        for name in _CAST & sizes.keys():
            sizes[name] /= 2
        sizes["attention.out"] *= 1.5
    else:
        for name in _CAST - ROUTED:
            sizes.pop(name, None)


def _without_swiglu(job: Job, software: Software, sizes: dict[str, float]) -> dict[str, float]:
    """The tensors without SwiGLU's result where the backward computes it: `passing_bytes` counts it there."""
    computed = {"ffn.product", "shared.product"} if recomputes_swiglu(job, software) else set()
    return {name: size for name, size in sizes.items() if name not in computed}


def _apart(job: Job) -> float:
    """The fraction of blocks whose attention is the kernel for windows and documents: a 1B model with a window kept its
    queries, keys and values once on an H200."""
    model = job.model
    if job.data.mask_documents:
        return 1.0
    if model.sliding_window is None or model.sliding_window >= job.batch.sequence_length:
        return 0.0
    return 0.5 if model.window_layers == "alternate" else 1.0


def side_by_side(job: Job, software: Software) -> float:
    """Separate weights of one product are copied for it and kept for its backward, unless their working copies lie side
    by side; fp8 keeps all it has cast."""
    if software.lean_blocks and joins_weights(job):
        return 0.0
    if not software.own or software.fusion != "fused" or job.layout.tp > 1 or job.model.latent is not None:
        return 0.0
    if job.model.adapter is not None:  # frozen ones are not kept
        return 0.0
    weights = [columns * inner for _, columns, inner in products_of(job, software)]
    if job.precision.format == "fp8":
        return float(sum(weights))
    gated = job.model.activation == "swiglu" and feedforward_width(job.model) > 0
    fused = weights[:2] if gated else weights[:1]
    return float(job.precision.number_bytes * sum(fused))


def joins_weights(job: Job) -> bool:
    """Whether working copies of weights lie side by side: on one device, and without adapters, which leave weights as
    they are, or fp8, whose casts are concatenated."""
    plain = job.precision.format in ("bf16", "fp16") and job.model.adapter is None
    return plain and ranks_of(job.layout) == 1 and not {"optimizer", "params"} & set(job.memory.offload)


def sizes_of(job: Job, mode: str) -> dict[str, float]:
    """A block's saved tensors on one rank by name, as our own trainer saves them."""
    layout, batch = job.layout, job.batch
    cut = (layout.tp, layout.sp, layout.cp, layout.cp_method)
    return dict(_sizes(job.model, batch.micro_batch, batch.sequence_length, job.precision.format, cut, mode))


@lru_cache(maxsize=4096)
def _sizes(
    model: Model, micro_batch: int, sequence: int, compute: str, cut: tuple[int, bool, int, str], mode: str
) -> dict[str, float]:
    bare = Job()
    sections = {
        "batch": {"micro_batch": micro_batch, "sequence_length": sequence},
        "layout": dict(zip(("tp", "sp", "cp", "cp_method"), cut, strict=True)),
        "precision": {"compute": compute},
    }
    update = {name: getattr(bare, name).model_copy(update=fields) for name, fields in sections.items()}
    named = saved_by_name(bare.model_copy(update={"model": model} | update), mode, first=False, last=False)  # type: ignore[arg-type]
    return {name: float(size) for (place, name), size in named.items() if place}
