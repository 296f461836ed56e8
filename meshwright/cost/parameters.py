"""The parameter tensors of a model, from its shape: the one place that knows how many elements each has."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from meshwright.job import Job, Model


@dataclass(frozen=True)
class Tensor:
    """One parameter tensor."""

    elements: int
    cut: bool
    """Whether tensor parallelism gives every rank a share of it, where the heads allow."""
    product: bool = False
    """Whether it is a matrix that multiplies activations."""


@lru_cache(maxsize=1024)
def block_tensors(shape: Model) -> Mapping[str, Tensor]:
    """A block's parameters by their names in the model."""
    q, kv, inner = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.ffn_width
    rows = {"attention.q": q, "attention.k": kv, "attention.v": kv, "ffn.up": inner}
    if shape.activation == "swiglu":
        rows["ffn.gate"] = inner
    tensors = {f"{name}.weight": Tensor(shape.width * size, cut=True, product=True) for name, size in rows.items()}
    tensors |= {
        f"{name}.bias": Tensor(size, cut=True)
        for name, size in rows.items()
        if (shape.qkv_bias if name.startswith("attention") else shape.linear_bias)
    }
    for name, size in (("attention.o", q), ("ffn.down", inner)):
        tensors[f"{name}.weight"] = Tensor(shape.width * size, cut=True, product=True)
        if shape.linear_bias:
            tensors[f"{name}.bias"] = Tensor(shape.width, cut=False)
    if shape.qk_norm:
        tensors |= {f"attention.{name}.weight": Tensor(shape.head_dim, cut=False) for name in ("q_norm", "k_norm")}
    for name in ("attention_norm", "ffn_norm"):
        tensors |= {f"{name}.{part}": Tensor(shape.width, cut=False) for part in _norm_parts(shape)}
    return tensors


def block_products(shape: Model) -> int:
    """Elements of a block's matrices."""
    return sum(tensor.elements for tensor in block_tensors(shape).values() if tensor.product)


@lru_cache(maxsize=1024)
def block_parameters(shape: Model, tp: int = 1) -> float:
    """Elements of a block on one of `tp` tensor-parallel ranks; key-value heads that `tp` does not divide are whole."""
    copied = ("attention.k.", "attention.v.") if shape.kv_heads % tp else ()
    return sum(
        tensor.elements / (tp if tensor.cut and not name.startswith(copied) else 1)
        for name, tensor in block_tensors(shape).items()
    )


def layer_parameters(job: Job) -> float:
    """Elements of one block on one tensor-parallel rank."""
    return block_parameters(job.model, job.layout.tp)


def stage_parameters(job: Job, layers: int, *, first: bool, last: bool) -> float:
    """Elements of a stage on one tensor-parallel rank; a tied table is held at both ends of a pipeline."""
    model = job.model
    table = model.vocab_size * model.width / job.layout.tp
    tables = (first or last) if model.tied and job.layout.pp == 1 else first + last
    positions = model.max_sequence_length * model.width if first and model.positions == "learned" else 0
    return layers * layer_parameters(job) + tables * table + positions


def matmul_parameters(shape: Model) -> int:
    """Weights that multiply activations: projections and the head (tied or not); no lookups, norms or biases."""
    return shape.layers * block_products(shape) + shape.vocab_size * shape.width


def parameter_count(shape: Model) -> int:
    """Every trainable element of the shape, a tied table counted once."""
    block = sum(tensor.elements for tensor in block_tensors(shape).values())
    tables = (1 if shape.tied else 2) * shape.vocab_size * shape.width
    positions = shape.max_sequence_length * shape.width if shape.positions == "learned" else 0
    return shape.layers * block + len(_norm_parts(shape)) * shape.width + tables + positions


def tensor_count(shape: Model) -> int:
    """Parameter tensors of the whole model."""
    ends = len(_norm_parts(shape)) + (1 if shape.tied else 2) + (shape.positions == "learned")
    return shape.layers * len(block_tensors(shape)) + ends


def _norm_parts(shape: Model) -> tuple[str, ...]:
    return ("weight", "bias") if shape.norm == "layernorm" else ("weight",)
