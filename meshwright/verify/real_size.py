"""The blocks of a job at their real size, which the check makes smaller: forward and backward on the meta device.

It computes shapes and nothing else, so any size costs milliseconds. Each kind of block takes part once (dense, with
experts, with and without a window, of extra tokens, of an encoder), with embedding, head and loss.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import UserError
from meshwright.job import Job, Model
from meshwright.layout import padded_vocabulary
from meshwright.model import Documents, Media, build_architecture
from meshwright.model.moe import Compute, Meanwhile, MixtureOfExperts
from meshwright.parallel import failed_module
from meshwright.verify.ranks import run_ranks
from meshwright.verify.shrink import Change, shrink

MOST_SEQUENCES = 2
EXPERTS = 2
"""That rows are sent to: the others are of the same shape."""
_FIELDS = {
    "attention": ("heads", "kv_heads", "head_dim"),
    "ffn": ("ffn_width",),
    "shared": ("experts.shared_width",),
    "moe": ("experts.count", "experts.top_k", "experts.groups", "experts.groups_kept"),
    "embed": ("vocab_size",),
    "position_embed": ("max_sequence_length",),
    "head": ("vocab_size",),
    "vision": ("vision.width", "vision.heads", "vision.image_size", "vision.patch"),
    "audio": ("audio.width", "audio.heads", "audio.mels"),
}
"""What decides the shape of a module, by a part of its name."""


def require_real_size(job: Job) -> list[Change]:
    """Refuse a job with a block that fails at its real size, or as a tensor-parallel rank has it.

    A model file that fails at any size there (it may read values, which the meta device has none of) is not checked,
    which is a change to report.
    """
    # In a fork: a backward asks for GPUs, after which no fork of this process could use one.
    changes: list[Change] = run_ranks(_check_real_size, 1, job)[0]
    return changes


def _check_real_size(job: Job) -> list[Change]:
    try:
        _run_blocks(job, job.model, job.batch.sequence_length)
        if job.model.file is None and job.layout.tp * job.layout.cp > 1:
            _run_blocks(job, _share(job), job.batch.sequence_length // job.layout.cp)
    except Exception as error:
        if job.model.file is not None and _fails_when_small(job):
            text = f"model.file {job.model.file}: its real size is not checked, as the meta device cannot run it"
            return [Change(text, hides=True)]
        raise _refusal(job, error) from error
    return []


def _run_blocks(job: Job, shape: Model, sequence: int) -> None:
    shape = _few_blocks(shape)
    # A loss of the user's own may read values.
    shape = shape.model_copy(update={"loss": "cross-entropy"})
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # a model of the user's own says it again where it trains
        model = build_architecture(shape).model
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                _send_to_few_experts(module)
        tokens_BS = torch.zeros((min(job.batch.micro_batch, MOST_SEQUENCES), sequence), dtype=torch.int64)
        arguments: dict[str, Any] = {"positions": None, "documents": None, "draws": None}
        if job.data.mask_documents:
            arguments |= {"positions": tokens_BS, "documents": Documents(tokens_BS)}
        if shape.extra_tokens:
            arguments["ahead"] = [(tokens_BS, tokens_BS)] * shape.extra_tokens
        if (encoder := shape.encoder) is not None:
            items_BK = torch.zeros(len(tokens_BS), encoder.slots, *encoder.item_shape)
            places_BKT = torch.zeros(len(tokens_BS), encoder.slots, encoder.tokens, dtype=torch.int64)
            arguments["media"] = Media(items_BK, places_BKT)
        model(tokens_BS, labels=tokens_BS, valid_count=tokens_BS.numel(), **arguments).backward()


def _few_blocks(shape: Model) -> Model:
    """A dense layer if the first ones are, two others (every second may have a window), a block of the encoder."""
    dense = 0 if shape.experts is None else min(1, shape.experts.first_dense)
    changes: dict[str, Any] = {"layers": min(shape.layers, dense + 2)}
    if shape.experts is not None:
        changes["experts"] = shape.experts.model_copy(update={"first_dense": dense})
    if (encoder := shape.encoder) is not None:
        unused = encoder.layers - encoder.used_layers
        changes[encoder.section] = encoder.model_copy(update={"layers": unused + 1})
    return shape.model_copy(update=changes)


def _share(job: Job) -> Model:
    """The decoder as a tensor-parallel rank has it."""
    shape, tp = job.model.decoder, job.layout.tp
    changes: dict[str, Any] = {
        "heads": shape.heads // tp,
        "kv_heads": shape.kv_heads // tp if shape.kv_heads % tp == 0 else 1,
        "ffn_width": max(1, shape.ffn_width // tp),
        "vocab_size": padded_vocabulary(job) // tp,
    }
    if shape.experts is not None:
        shared_width = shape.experts.shared_width // tp
        changes["experts"] = shape.experts.model_copy(update={"shared_width": shared_width})
    return shape.model_copy(update=changes)


def _send_to_few_experts(moe: MixtureOfExperts) -> None:
    """Let a few experts have all rows: how many go to each depends on values."""
    few = min(EXPERTS, moe.router.experts.count)
    for linear in (moe.experts.gate_up, moe.experts.down):
        rows_of_few = few * linear.outputs
        linear.own = lambda weights, rows=rows_of_few: weights[:rows]  # type: ignore[misc]

    def dispatch(rows_RD: Tensor, _: Tensor, compute: Compute, meanwhile: Meanwhile) -> Tensor:
        share, rest = divmod(len(rows_RD), few)
        counts_N = torch.empty(few, dtype=torch.int64)
        counts_N.tolist = lambda: [share] * (few - 1) + [share + rest]  # type: ignore[method-assign]
        meanwhile()
        return compute(rows_RD, counts_N)

    moe.dispatch = moe.dispatch_even = dispatch


def _fails_when_small(job: Job) -> bool:
    small, _ = shrink(job)
    try:
        _run_blocks(small, small.model, small.batch.sequence_length)
    except Exception:
        return True
    return False


def _refusal(job: Job, error: Exception) -> UserError:
    module = failed_module(error)
    lines = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
    where = "in its backward" if module is None else f"in {_real_name(job.model, module)}"
    if job.model.file is not None:
        subject = f'model.file = "{job.model.file}"'
        return UserError(f"{subject} fails at its real size {where} ({what}); correct what depends on the size")
    parts = () if module is None else module.split(".")
    fields = next((_FIELDS[part] for part in parts if part in _FIELDS), ("width", "heads"))
    values = ", ".join(f"model.{field} = {_value(job.model, field)}" for field in fields)
    return UserError(
        f"{values}: {_kind(job.model, module)} fails at its real size {where} ({what}); change these, or report it "
        "with the job file"
    )


def _value(shape: Model, field: str) -> Any:
    value: Any = shape
    for part in field.split("."):
        value = getattr(value, part)
    return value


def _layer(module: str) -> int | None:
    first, _, rest = module.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else None


def _real_name(shape: Model, module: str) -> str:
    """The name of a module in the whole model, whose first layers of each kind were run."""
    layer, few = _layer(module), _few_blocks(shape)
    if layer is None:
        return module
    dense = 0 if few.experts is None else few.experts.first_dense
    if layer >= few.layers:
        real = layer - few.layers + shape.layers
    else:
        real = layer if layer < dense or shape.experts is None else layer - dense + shape.experts.first_dense
    return ".".join(["layers", str(real), *module.split(".")[2:]])


def _kind(shape: Model, module: str | None) -> str:
    """What kind of block a module of the few blocks belongs to."""
    if module is None or (layer := _layer(module)) is None:
        return "the model" if module is None or shape.encoder is None else "the encoder"
    few = _few_blocks(shape)
    if layer >= few.layers:
        return "the block of extra tokens"
    return "a block with experts" if few.has_experts(layer) else "a dense block"
