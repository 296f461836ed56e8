"""How many elements a rank holds of a stage."""

from meshwright.job import Job


def layer_parameters(job: Job) -> float:
    """Elements of one block on one tensor-parallel rank."""
    model = job.model
    attention = 2 * model.width * (model.heads + model.kv_heads) * model.head_dim
    feedforward = model.width * model.ffn_width * (3 if model.activation == "swiglu" else 2)
    return (attention + feedforward) / job.layout.tp


def stage_parameters(job: Job, layers: int, *, first: bool, last: bool) -> float:
    """Elements of a stage on one tensor-parallel rank; a tied table is held at both ends of a pipeline."""
    table = job.model.vocab_size * job.model.width / job.layout.tp
    tables = (first or last) if job.model.tied and job.layout.pp == 1 else first + last
    return layers * layer_parameters(job) + tables * table


def tensors_of(job: Job) -> int:
    """Parameters of the whole model by their number of names."""
    model = job.model
    products = 6 + (model.activation == "swiglu")
    biases = 3 * model.qkv_bias + (products - 3) * model.linear_bias
    norms = 2 * (2 if model.norm == "layernorm" else 1) + 2 * model.qk_norm
    return model.layers * (products + biases + norms) + 3
