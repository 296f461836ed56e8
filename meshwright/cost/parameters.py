"""The parameter tensors of a model, from its shape: the one place that knows how many elements each has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.job import Job, Latent, Model
from meshwright.job.adapter import adapted
from meshwright.job.audio import KERNEL, Audio
from meshwright.job.encoder import Encoder, encoder_part
from meshwright.job.vision import CHANNELS, Vision


@dataclass(frozen=True)
class Tensor:
    """One parameter tensor."""

    elements: int
    cut: bool
    """Whether tensor parallelism gives every rank a share of it, where the heads allow."""
    product: bool = False
    """Whether it is a matrix that multiplies activations."""
    trained: bool = True
    """Whether it has gradients: next to adapters, only those of the adapters have."""
    used: float = 1.0
    """The share of it that one token uses: of the experts' weights, that of its own experts."""


@lru_cache(maxsize=1024)
def block_tensors(shape: Model, layer: int = -1) -> Mapping[str, Tensor]:
    """The parameters of a layer's block by their names in the model; the last layer's by default.

    Only whether a layer has experts makes a difference: the first ones may have none.
    """
    tensors = dict(_attention_tensors(shape))
    if shape.has_experts(layer % shape.layers):
        tensors |= _expert_tensors(shape)
    else:
        tensors |= _feedforward_tensors(shape, "ffn", shape.ffn_width)
    for name in ("attention_norm", "ffn_norm"):
        tensors |= {f"{name}.{part}": Tensor(shape.width, cut=False) for part in _norm_parts(shape)}
    if shape.adapter is None:
        return tensors
    frozen = {name: replace(tensor, trained=False) for name, tensor in tensors.items()}
    return frozen | _adapter_tensors(shape, layer)


@lru_cache(maxsize=64)
def encoder_shape(encoder: Encoder) -> Model:
    """A decoder whose blocks have the sizes of an encoder's."""
    return Model(
        width=encoder.width,
        layers=encoder.layers,
        heads=encoder.heads,
        ffn_width=encoder.ffn_width,
        norm="layernorm",
        activation="gelu",
        positions="learned",
        qkv_bias=True,
        linear_bias=True,
    )


@lru_cache(maxsize=64)
def encoder_tensors(shape: Model, encoder: Encoder) -> Mapping[str, Tensor]:
    """The parameters of an encoder and of its projector by their names in it."""
    width, tensors = encoder.width, _entering_tensors(encoder)
    tensors |= {f"post_norm.{part}": Tensor(width, cut=False) for part in ("weight", "bias")}
    block = dict(block_tensors(encoder_shape(encoder)))
    if not encoder.key_bias:
        del block["attention.k.bias"]
    for layer in range(encoder.layers):
        tensors |= {f"layers.{layer}.{name}": own for name, own in block.items()}
    tensors |= {
        "projector.up.weight": Tensor(width * shape.width, cut=True, product=True),
        "projector.up.bias": Tensor(shape.width, cut=True),
        "projector.down.weight": Tensor(shape.width**2, cut=True, product=True),
        "projector.down.bias": Tensor(shape.width, cut=False),
    }
    trained = {name: encoder_part(f"{encoder.section}.{name}") in encoder.train for name in tensors}
    return {name: replace(tensor, trained=trained[name]) for name, tensor in tensors.items()}


def _entering_tensors(encoder: Encoder) -> dict[str, Tensor]:
    """What makes tokens of an encoder's items."""
    width = encoder.width
    if isinstance(encoder, Audio):
        inputs = {"first": encoder.mels, "second": width}
        products = {f"{name}.weight": width * KERNEL * size for name, size in inputs.items()}
        tensors = {name: Tensor(size, cut=False, product=True) for name, size in products.items()}
        return tensors | {f"{name}.bias": Tensor(width, cut=False) for name in inputs}
    assert isinstance(encoder, Vision)
    whole = {"positions.weight": encoder.computed * width}
    if encoder.kind == "clip":
        whole |= {"class_token.weight": width, "pre_norm.weight": width, "pre_norm.bias": width}
    else:
        whole["patch.bias"] = width
    tensors = {name: Tensor(size, cut=False) for name, size in whole.items()}
    return tensors | {"patch.weight": Tensor(width * CHANNELS * encoder.patch**2, cut=False, product=True)}


def projection_sizes(shape: Model) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the projections that may have adapters, by their names in a block."""
    q, kv, width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.width
    sizes = {"q": (q, width), "k": (kv, width), "v": (kv, width), "o": (width, q)}
    if (latent := shape.latent) is not None:
        up = shape.heads * (shape.head_dim - latent.rope_dim + latent.value_dim)
        sizes = {"q": (q, latent.q_rank or width), "kv": (up, latent.kv_rank), "kv_down": (latent.kv_rank, width)}
        sizes |= {"k_rope": (latent.rope_dim, width), "o": (width, shape.heads * latent.value_dim)}
        sizes |= {"q_down": (latent.q_rank or 0, width)}
    found = {f"attention.{name}": size for name, size in sizes.items()}
    shared = 0 if shape.experts is None else shape.experts.shared_width
    for module, inner in (("ffn", shape.ffn_width), ("shared", shared)):
        found |= {f"{module}.{name}": (inner, width) for name in ("gate", "up")} | {f"{module}.down": (width, inner)}
    return found


def _adapter_tensors(shape: Model, layer: int) -> dict[str, Tensor]:
    """A is whole on every tensor-parallel rank where the projection is sharded by outputs, else B is."""
    adapter, sizes, tensors = shape.adapter, projection_sizes(shape), dict[str, Tensor]()
    assert adapter is not None
    for group, name in adapted(shape, layer):
        outputs, inputs = sizes[f"{group}.{name}"]
        by_inputs, whole = name in ("o", "down"), name in ("q_down", "kv_down", "k_rope")
        by_outputs = not by_inputs and not whole
        tensors[f"{group}.{name}.lora_a"] = Tensor(adapter.rank * inputs, cut=by_inputs, product=True)
        tensors[f"{group}.{name}.lora_b"] = Tensor(adapter.rank * outputs, cut=by_outputs, product=True)
        if adapter.dora:
            tensors[f"{group}.{name}.lora_magnitude"] = Tensor(outputs, cut=by_outputs)
    return tensors


def extra_tensors(shape: Model) -> dict[str, Tensor]:
    """The parameters that a block of an extra token has besides those of any block."""
    tensors = {"joined.weight": Tensor(2 * shape.width * shape.width, cut=False, product=True)}
    for name in ("hidden_norm", "embedding_norm", "output_norm"):
        tensors |= {f"{name}.{part}": Tensor(shape.width, cut=False) for part in _norm_parts(shape)}
    return tensors


def _attention_tensors(shape: Model) -> dict[str, Tensor]:
    if shape.latent is not None:
        return _latent_tensors(shape, shape.latent)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = {"attention.q": q, "attention.k": kv, "attention.v": kv}
    tensors = {f"{name}.weight": Tensor(shape.width * size, cut=True, product=True) for name, size in rows.items()}
    tensors["attention.o.weight"] = Tensor(shape.width * q, cut=True, product=True)
    if shape.qkv_bias:
        tensors |= {f"{name}.bias": Tensor(size, cut=True) for name, size in rows.items()}
    if shape.linear_bias:
        tensors["attention.o.bias"] = Tensor(shape.width, cut=False)
    if shape.qk_norm:
        sizes = (q, kv) if shape.qk_norm_over == "width" else (shape.head_dim, shape.head_dim)
        for name, size in zip(("q_norm", "k_norm"), sizes, strict=True):
            tensors[f"attention.{name}.weight"] = Tensor(size, cut=False)
    if shape.sinks:
        tensors["attention.sinks.weight"] = Tensor(shape.heads, cut=True)
    return tensors


def _latent_tensors(shape: Model, latent: Latent) -> dict[str, Tensor]:
    unrotated = shape.head_dim - latent.rope_dim
    down = {"kv_down": latent.kv_rank, "k_rope": latent.rope_dim}
    norms = {"kv_down_norm": latent.kv_rank}
    if latent.q_rank is not None:
        down["q_down"], norms["q_down_norm"] = latent.q_rank, latent.q_rank
    up = {
        "q": (latent.q_rank or shape.width) * shape.heads * shape.head_dim,
        "kv": latent.kv_rank * shape.heads * (unrotated + latent.value_dim),
        "o": shape.width * shape.heads * latent.value_dim,
    }
    tensors = {name: Tensor(shape.width * size, cut=False, product=True) for name, size in down.items()}
    tensors |= {name: Tensor(size, cut=False) for name, size in norms.items()}
    tensors |= {name: Tensor(size, cut=True, product=True) for name, size in up.items()}
    return {f"attention.{name}.weight": tensor for name, tensor in tensors.items()}


def _feedforward_tensors(shape: Model, module: str, inner: int) -> dict[str, Tensor]:
    rows = [f"{module}.up", f"{module}.gate"] if shape.activation == "swiglu" else [f"{module}.up"]
    names = [*rows, f"{module}.down"]
    tensors = {f"{name}.weight": Tensor(shape.width * inner, cut=True, product=True) for name in names}
    if shape.linear_bias:
        tensors |= {f"{name}.bias": Tensor(inner, cut=True) for name in rows}
        tensors[f"{module}.down.bias"] = Tensor(shape.width, cut=False)
    return tensors


def _expert_tensors(shape: Model) -> dict[str, Tensor]:
    """Tensor parallelism leaves experts alone: expert parallelism distributes them."""
    experts = shape.experts
    assert experts is not None
    used = experts.top_k / experts.count
    tensors = {"moe.router.linear.weight": Tensor(experts.count * shape.width, cut=False, product=True)}
    if shape.linear_bias:
        tensors["moe.router.linear.bias"] = Tensor(experts.count, cut=False)
    for name, rows, columns in (
        ("gate_up", 2 * experts.ffn_width, shape.width),
        ("down", shape.width, experts.ffn_width),
    ):
        weight = Tensor(experts.count * rows * columns, cut=False, product=True, used=used)
        tensors[f"moe.experts.{name}.weight"] = weight
        if shape.linear_bias:
            tensors[f"moe.experts.{name}.bias"] = Tensor(experts.count * rows, cut=False, used=used)
    if experts.shared_width:
        tensors |= _feedforward_tensors(shape, "shared", experts.shared_width)
    return tensors


def block_products(shape: Model, layer: int = -1) -> int:
    """Elements of a block's matrices that one token uses."""
    return round(sum(t.elements * t.used for t in block_tensors(shape, layer).values() if t.product))


@dataclass(frozen=True)
class Elements:
    """Parameters on one rank before data-parallel ranks share them."""

    plain: float = 0.0
    """All but experts: what tensor parallelism leaves to a rank."""
    experts: float = 0.0
    """What expert parallelism leaves to it."""

    @property
    def total(self) -> float:
        """Both."""
        return self.plain + self.experts

    def owned(self, job: Job) -> float:
        """Those whose states are this rank's where ZeRO shards them."""
        return self.plain / sharers(job) + self.experts / expert_sharers(job)

    def __add__(self, other: "Elements") -> "Elements":
        return Elements(self.plain + other.plain, self.experts + other.experts)

    def __mul__(self, times: float) -> "Elements":
        return Elements(self.plain * times, self.experts * times)


def sharers(job: Job) -> int:
    """The ranks that share the states of a parameter that is no expert's, under ZeRO."""
    return job.layout.dp_shard * job.layout.cp


def expert_sharers(job: Job) -> int:
    """The ranks that share the states of an expert's: tensor-parallel ranks hold different experts, or shards."""
    layout = job.layout
    return max(1, layout.tp * layout.dp_shard * layout.cp // layout.ep)


@lru_cache(maxsize=1024)
def block_elements(shape: Model, tp: int = 1, ep: int = 1, layer: int = -1) -> Elements:
    """A block's trained elements on one of `tp` tensor-parallel and `ep` expert-parallel ranks; key-value heads that
    `tp` does not divide are whole."""
    plain = experts = 0.0
    for name, tensor in block_tensors(shape, layer).items():
        if not tensor.trained:
            continue
        if name.startswith("moe.experts."):
            experts += tensor.elements / ep
        else:
            plain += tensor.elements / (tp if is_cut(shape, name, tensor, tp) else 1)
    return Elements(plain, experts)


def is_cut(shape: Model, name: str, tensor: Tensor, tp: int) -> bool:
    """Whether each of `tp` ranks has a share of a block's tensor."""
    copied = ("attention.k.", "attention.v.") if shape.kv_heads % tp else ()
    return tensor.cut and not name.startswith(copied)


def layer_elements(job: Job, layer: int = -1) -> Elements:
    """Trained elements of a layer's block on one rank; the last layer's by default."""
    return block_elements(job.model, job.layout.tp, job.layout.ep, layer)


def stage_elements(job: Job, layers: range, *, first: bool, last: bool, trained: bool = False) -> Elements:
    """Elements of a stage on one rank but for the base of adapters; or those of them that are trained.

    Layers after the model's last are blocks of extra tokens.
    """
    model, encoder = job.model, Elements()
    if first and model.encoder is not None:
        tensors = encoder_tensors(model, model.encoder).values()
        held = [each for each in tensors if each.trained or not trained]
        encoder = Elements(sum(each.elements / (job.layout.tp if each.cut else 1) for each in held))
    if trained and not model.trains_decoder:
        return encoder
    dense = sum(not model.has_experts(layer) for layer in layers) if model.experts else 0
    blocks = layer_elements(job) * (len(layers) - dense)
    if dense:
        blocks += layer_elements(job, 0) * dense
    further = sum(layer >= model.layers for layer in layers)
    blocks += Elements(sum(tensor.elements for tensor in extra_tensors(model).values())) * further
    if model.adapter is not None:
        return blocks
    return blocks + encoder + Elements(table_elements(job, first=first, last=last))


def table_elements(job: Job, *, first: bool, last: bool) -> float:
    """Elements of a stage's tables on one rank; a tied one is held at both ends of a pipeline, and so is the
    embedding's with extra tokens."""
    model = job.model
    table = model.vocab_size * model.width / job.layout.tp
    tables = (first or last) if model.tied and job.layout.pp == 1 else first + last
    if model.extra_tokens and not model.tied and job.layout.pp > 1:
        tables += last
    positions = model.max_sequence_length * model.width if first and model.positions == "learned" else 0
    return tables * table + positions


def matmul_parameters(shape: Model) -> int:
    """Weights that multiply a token's activations: projections, of experts only its own, and the head (tied or not),
    which extra tokens use as often again; no lookups, norms or biases."""
    blocks = sum(count * block_products(shape, layer) for layer, count in _kinds(shape))
    joined = sum(tensor.elements for tensor in extra_tensors(shape).values() if tensor.product)
    return blocks + shape.extra_tokens * joined + (1 + shape.extra_tokens) * shape.vocab_size * shape.width


def encoder_flops(shape: Model, encoder: Encoder) -> float:
    """Model FLOPs to train on one item: 6 per token and weight that multiplies it, and as many per pair of tokens
    and channel of keys and of values; 2 if nothing of the encoder is trained."""
    products = {"encoder": 0.0, "projector": 0.0}
    for name, tensor in encoder_tensors(shape, encoder).items():
        if tensor.product and not (name.startswith("layers.") and int(name.split(".")[1]) >= encoder.used_layers):
            inside = encoder.computed if name.startswith("layers.") else encoder.tokens
            if name == "first.weight" and isinstance(encoder, Audio):
                inside = encoder.frames
            products["projector" if name.startswith("projector.") else "encoder"] += inside * tensor.elements
    products["encoder"] += encoder.used_layers * encoder.computed**2 * 2 * encoder.width
    return (6.0 if "encoder" in encoder.train else 2.0) * products["encoder"] + 6.0 * products["projector"]


def parameter_count(shape: Model) -> int:
    """Every element of the shape's parameters, a tied table counted once."""
    return _count(shape, lambda tensor: tensor.elements)


def trained_parameters(shape: Model) -> int:
    """Those that are trained: next to adapters, only the adapters', of a model with an encoder, those of its parts
    that are."""
    if shape.encoder is not None:
        tensors = encoder_tensors(shape, shape.encoder).values()
        decoder = parameter_count(shape.decoder) if "decoder" in shape.encoder.train else 0
        return decoder + sum(tensor.elements for tensor in tensors if tensor.trained)
    if shape.adapter is None:
        return parameter_count(shape)
    return parameter_count(shape) - parameter_count(shape.base)


def active_parameters(shape: Model) -> int:
    """The elements that take part in computing one token: of the experts' weights, those of its own experts."""
    return _count(shape, lambda tensor: round(tensor.elements * tensor.used))


def _count(shape: Model, elements: Callable[[Tensor], int]) -> int:
    blocks = sum(n * sum(map(elements, block_tensors(shape, layer).values())) for layer, n in _kinds(shape))
    blocks += shape.extra_tokens * sum(map(elements, extra_tensors(shape).values()))
    tables = (1 if shape.tied else 2) * shape.vocab_size * shape.width
    positions = shape.max_sequence_length * shape.width if shape.positions == "learned" else 0
    if shape.encoder is not None:
        blocks += sum(map(elements, encoder_tensors(shape, shape.encoder).values()))
    return blocks + len(_norm_parts(shape)) * shape.width + tables + positions


def tensor_count(shape: Model) -> int:
    """Trained tensors of the whole model."""
    if shape.adapter is not None:
        return sum(n * sum(t.trained for t in block_tensors(shape, layer).values()) for layer, n in _kinds(shape))
    ends = len(_norm_parts(shape)) + (1 if shape.tied else 2) + (shape.positions == "learned")
    ends += shape.extra_tokens * len(extra_tensors(shape))
    ends += len(encoder_tensors(shape, shape.encoder)) if shape.encoder is not None else 0
    return sum(count * len(block_tensors(shape, layer)) for layer, count in _kinds(shape)) + ends


def _kinds(shape: Model) -> list[tuple[int, int]]:
    """One layer of each kind, and how many there are: those without experts come first, and those of extra tokens are
    of the last kind."""
    dense = 0 if shape.experts is None else shape.experts.first_dense
    return [(layer, count) for layer, count in ((0, dense), (shape.layers - 1, shape.blocks - dense)) if count]


def _norm_parts(shape: Model) -> tuple[str, ...]:
    return ("weight", "bias") if shape.norm == "layernorm" else ("weight",)
