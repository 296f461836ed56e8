"""Features of a job by name, so that drawn jobs can be counted by them."""

from collections.abc import Callable, Iterator

from meshwright.job import Job
from meshwright.layout import ranks_of


def _if(value: object, name: str) -> Iterator[str]:
    if value:
        yield name


def _experts(job: Job) -> Iterator[str]:
    experts = job.model.experts
    if experts is None:
        return
    yield "experts"
    yield f"{experts.scores} scores"
    yield from _if(job.layout.ep > 1, "expert parallelism")
    yield from _if(experts.top_k == 1, "one expert per token")
    yield from _if(not experts.normalised, "scores not normalised")
    yield from _if(experts.groups > 1, "expert groups")
    yield from _if(experts.shared_width, "shared experts")
    yield from _if(experts.first_dense, "dense first layers")
    yield from _if(experts.capacity is not None, "expert capacity")
    yield from _if(experts.balance_rate, "balance rate")
    yield from _if(experts.balance_loss or experts.z_loss, "balance losses")
    yield from _if(experts.swiglu_limit, "swiglu limit")
    yield from _if(job.model.linear_bias, "expert biases")


def _model(job: Job) -> Iterator[str]:
    model = job.model
    yield from _if(model.latent, "MLA")
    yield from _if(model.sinks, "sinks")
    yield from _if(model.sliding_window and model.window_layers == "all", "sliding window")
    yield from _if(model.sliding_window and model.window_layers == "alternate", "alternating windows")
    if model.rope_scaling is not None:
        yield f"rope scaling {model.rope_scaling.kind}"
    yield from _if(model.qk_norm, f"qk_norm over {model.qk_norm_over}")
    yield from _if(model.positions == "learned", "learned positions")
    yield from _if(model.tied, "tied head")
    yield from _if(model.dropout, "dropout")
    yield from _if(model.extra_tokens, f"extra_tokens {model.extra_tokens}")
    if model.vision is not None:
        yield f"vision {model.vision.kind}"
    yield from _if(model.audio, "audio")
    yield from _if(model.encoder is not None and model.freezes, "frozen parts beside an encoder")
    if model.adapter is not None:
        yield f"adapters, base {model.adapter.base}"
        yield from _if(model.adapter.dora, "DoRA")
        yield from _if(model.adapter.rslora, "rsLoRA")
    yield from _if(job.prefers, job.preference.loss)


def _layout(job: Job) -> Iterator[str]:
    layout = job.layout
    yield f"{ranks_of(layout)} ranks"
    yield f"zero {layout.zero_stage}"
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
        yield from _if(getattr(layout, axis) > 1, axis)
    yield from _if(layout.cp > 1, layout.cp_method)
    yield from _if(layout.pp > 1, layout.schedule)
    yield from _if(layout.split, "split")
    yield from _if(layout.compress != "none", f"compression {layout.compress}")
    yield from _if(job.accumulation > 1, "accumulation")


def _training(job: Job) -> Iterator[str]:
    yield job.optimizer.name
    yield f"{job.precision.optimizer_states} states"
    yield from _if(job.run.compiles, "compiled")
    recompute = job.memory.recompute
    kind = recompute if isinstance(recompute, str) else type(recompute).__name__.lower()
    yield from _if(kind != "none", f"recompute {kind}")
    yield from (f"offload {kind}" for kind in job.memory.offload)
    yield f"packing {job.data.packing}"
    yield from _if(job.data.mask_documents, "masked documents")
    yield from _if(job.data.format == "conversations", "conversations")
    yield from _if(job.data.weights is not None, "blend")
    yield from _if(job.data.stream, "streaming")
    yield from _if(job.data.workers, "workers")


PARTS: tuple[Callable[[Job], Iterator[str]], ...] = (_experts, _model, _layout, _training)


def features_of(job: Job) -> list[str]:
    """What a job uses, in words, the model's first."""
    return [name for part in PARTS for name in part(job)]
