"""What a rank computes: a block's projections, attention and elementwise work, the head, the embedding.

T tokens of a micro-batch on this rank, D width, F ffn width, H and K query and kv heads of this rank, E head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from meshwright.cost import MASTER_BYTES, chunk_rows, in_whole_lines, layer_elements
from meshwright.job import Job, Latent, Model
from meshwright.layout import gradient_format, kv_copies, kv_heads_of
from meshwright.plan.adapters import adapter_products, made_s
from meshwright.plan.experts import expert_casts, moved_s, products_s
from meshwright.plan.fp8 import casts_s, slower
from meshwright.plan.kernels import Device, attention_s, matmul_s, memory_s
from meshwright.plan.software import Software


@dataclass(frozen=True)
class Work:
    """Seconds of one part of the model over one micro-batch, by pass and kind."""

    forward_matmul: float = 0.0
    forward_attention: float = 0.0
    forward_elementwise: float = 0.0
    input_matmul: float = 0.0
    """Gradients of inputs: the backward's first half."""
    weight_matmul: float = 0.0
    """Gradients of weights: its second half."""
    backward_attention: float = 0.0
    backward_elementwise: float = 0.0
    again: float = 0.0
    """Forward work that the backward repeats."""

    @property
    def forward(self) -> float:
        """The whole forward."""
        return self.forward_matmul + self.forward_attention + self.forward_elementwise

    @property
    def input(self) -> float:
        """The backward's first half, with what it repeats."""
        return self.input_matmul + self.backward_attention + self.backward_elementwise + self.again

    @property
    def backward(self) -> float:
        """The whole backward."""
        return self.input + self.weight_matmul

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, name) + getattr(other, name) for name in _PARTS))

    def __mul__(self, times: float) -> "Work":
        return Work(*(getattr(self, name) * times for name in _PARTS))

    def scaled(self, forward: float, inputs: float, weights: float) -> "Work":
        """The same shares at another pace: of the forward, and of the backward's two halves."""
        times = {"forward": forward, "input": inputs, "weight": weights, "backward": inputs, "again": inputs}
        return Work(*(getattr(self, name) * times[name.partition("_")[0]] for name in _PARTS))


_PARTS = tuple(field.name for field in fields(Work))


Product = tuple[int, int, int]
"""Rows, columns and inner size of a projection's forward: tokens, outputs, inputs."""


def tokens_of(job: Job) -> int:
    """Tokens of a micro-batch on one rank."""
    return job.batch.micro_batch * job.batch.sequence_length // job.layout.cp


def products_of(job: Job, software: Software) -> Iterator[Product]:
    """A block's projections on one rank, experts' aside; programs with fused kernels compute those of one input at
    once."""
    model, tp, tokens = job.model, job.layout.tp, tokens_of(job)
    fused = software.fusion == "fused"
    queries, keys = model.heads // tp * model.head_dim, kv_heads_of(job) * model.head_dim
    if model.latent is not None:
        yield from _latent_products(model, model.latent, tokens, tp, fused=fused)
    elif fused:
        yield tokens, queries + 2 * keys, model.width
    else:
        yield from ((tokens, queries, model.width), (tokens, keys, model.width), (tokens, keys, model.width))
    inner = -(-feedforward_width(model) // tp)
    gates = 2 if model.activation == "swiglu" else 1
    if inner and fused:
        yield tokens, gates * inner, model.width
    elif inner:
        yield from ((tokens, inner, model.width) for _ in range(gates))
    yield tokens, model.width, model.heads // tp * model.value_dim
    if inner:
        yield tokens, model.width, inner


def feedforward_width(model: Model) -> int:
    """The inner width of what every token of a block passes: with experts, of the shared one."""
    return model.ffn_width if model.experts is None else model.experts.shared_width


def _latent_products(model: Model, latent: Latent, tokens: int, tp: int, *, fused: bool) -> Iterator[Product]:
    """Down to the small vectors, on every tensor-parallel rank, and up to its heads."""
    heads, down = model.heads // tp, [latent.kv_rank, latent.rope_dim, *([latent.q_rank] if latent.q_rank else [])]
    yield from ((tokens, size, model.width) for size in ([sum(down)] if fused else down))
    yield tokens, heads * model.head_dim, latent.q_rank or model.width
    yield tokens, heads * (model.head_dim - latent.rope_dim + latent.value_dim), latent.kv_rank


def block_work(job: Job, device: Device, software: Software, mode: str) -> Work:
    """One block over one micro-batch, with recomputation by mode."""
    spares = software.own and job.model.experts is None
    products = list(products_of(job, software))
    pace = slower(job, device)
    forward = pace * sum(matmul_s(device, *product) for product in products)
    inputs = pace * sum(matmul_s(device, rows, inner, columns, kind="input") for rows, columns, inner in products)
    weights = pace * sum(matmul_s(device, columns, inner, rows, kind="weight") for rows, columns, inner in products)
    if job.model.adapter is not None:
        low = adapter_work(job, device, software, products)
        forward, inputs, weights = forward + low.forward_matmul, inputs + low.input_matmul, low.weight_matmul
    if device.compute == "fp8":
        cast, cast_back = casts_s(job, device, software, products)
        forward, inputs = forward + cast, inputs + cast_back
        if job.model.experts is not None and not software.own and not software.fused_experts:
            cast, cast_back = casts_s(job, device, software, expert_casts(job), layer_elements(job).experts)
            forward, inputs = forward + cast, inputs + cast_back
    summed = float(sum(inner * columns for _, columns, inner in products))
    if job.model.adapter is not None:
        summed = layer_elements(job).total
    weights += _gradient_sum_s(job, device, software, summed)
    attention, attention_back = _attention_s(job, device, software)
    elementwise, elementwise_back = _elementwise_s(job, device, software)
    if job.model.experts is not None:
        experts, rows_back, weights_back = products_s(job, device, software)
        forward, inputs, weights = forward + experts, inputs + rows_back, weights + weights_back
        moved, moved_back = moved_s(job, device, software)
        elementwise, elementwise_back = elementwise + moved, elementwise_back + moved_back
        weights += _gradient_sum_s(job, device, software, layer_elements(job).experts)
    again = {
        "none": 0.0,
        "selective": {
            "cheap": elementwise,
            "half": elementwise + forward / 2,
            "attention": attention,
        }[software.selective],
        # Nothing in the backward needs a block's last product, and our trainer stops before it.
        "full": forward + attention + elementwise - (pace * matmul_s(device, *products[-1]) if spares else 0.0),
        "segment": forward + attention + elementwise,
        "joined": forward + attention + elementwise,
    }[mode]
    return Work(forward, attention, elementwise, inputs, weights, attention_back, elementwise_back, again)


def adapter_work(job: Job, device: Device, software: Software, products: list[Product]) -> Work:
    """What adapters add to a block's products, whose own weights have no gradients, and what it takes to make these
    from codes, forward and backward."""
    low = list(adapter_products(job, tokens_of(job)))
    made = made_s(job, device, sum(columns * inner for _, columns, inner in products), software)
    return Work(
        forward_matmul=sum(matmul_s(device, *product) for product in low) + made,
        input_matmul=sum(matmul_s(device, rows, inner, columns, kind="input") for rows, columns, inner in low) + made,
        weight_matmul=sum(matmul_s(device, columns, inner, rows, kind="weight") for rows, columns, inner in low),
    )


def _gradient_sum_s(job: Job, device: Device, software: Software, parameters: float) -> float:
    """Gradients of a micro-batch added to the step's, in the format they are summed in.

    Sharded parameters are copied from what was gathered, and their gradients to what is scattered, for as many bytes;
    on a CPU both are measured with the transfers.
    """
    wide = job.precision.gradient_bytes
    moved = 2.0 * wide * parameters
    on_cpu = device.operations is not None
    if software.own and (job.layout.zero_stage == 0 or on_cpu):
        # The first micro-batch's are widened, by a GPU's update if there is no other; those of others are added.
        each = job.precision.number_bytes
        kept_narrow = gradient_format(job) == job.precision.format and not on_cpu
        first = 0 if each == wide or kept_narrow else each + wide
        moved = parameters * (first + (each + 2 * wide) * (job.accumulation - 1)) / job.accumulation
    if job.layout.zero_stage == 3 and not on_cpu:
        moved += parameters * 8
    return memory_s(device, moved, 1)


def _attention_s(job: Job, device: Device, software: Software) -> tuple[float, float]:
    model = job.model
    if model.window_layers == "all" or model.sliding_window is None:
        return _one_attention_s(job, device, software, model.sliding_window)
    both = [_one_attention_s(job, device, software, window) for window in (model.sliding_window, None)]
    return (both[0][0] + both[1][0]) / 2, (both[0][1] + both[1][1]) / 2


def _one_attention_s(job: Job, device: Device, software: Software, sliding: int | None) -> tuple[float, float]:
    model, sequence, cp = job.model, job.batch.sequence_length, job.layout.cp
    heads = model.heads // job.layout.tp
    window = min(sequence, sliding or sequence)
    queries = job.batch.micro_batch * sequence / cp
    if software.attention == "flash":
        seen = window * (1 - window / (2 * sequence))
        # Ours pads values to the size of keys.
        flops = 2.0 * queries * seen * heads * (model.head_dim + (model.head_dim if software.own else model.value_dim))
        # Ulysses gives a rank whole sequences of fewer heads, the others blocks as long as a rank's slice.
        spread = cp if job.layout.cp_method == "ulysses" else 1
        length = sequence if spread == cp else sequence // cp
        if device.measured is not None:
            rows, groups = job.batch.micro_batch * heads / spread, heads / (kv_heads_of(job) * kv_copies(job))
            masked = window < sequence
            if device.operations is not None:
                masked = masked or job.data.mask_documents
                if masked:  # a mask hides scores that a CPU has computed: measured over causal FLOPs
                    flops = 2.0 * queries * sequence * heads * model.head_dim
            elif masked and length > 2 * window:  # a window's edges waste as much as those of sequences twice as long
                rows, length = rows * length / (2 * window), 2 * window
            found = device.measured.attention_s(device.wide, flops, model.head_dim, length, rows, groups, masked=masked)
            if found is not None:
                return found
        about = model.head_dim, length, software.flash_generation
        return attention_s(device, flops, *about), attention_s(device, 2.5 * flops, *about)
    batch = job.batch.micro_batch * heads
    scores = batch * sequence * sequence
    forward = _batched_s(device, batch, sequence, sequence, model.head_dim)
    forward += _batched_s(device, batch, sequence, model.head_dim, sequence)
    # softmax reads and writes scores, dropout reads them and writes both its result and a mask
    forward += memory_s(device, scores * (2 + 2 + 2 + 2 + 1), 4)
    backward = 2 * forward_products(device, batch, sequence, model.head_dim)
    backward += memory_s(device, scores * (2 + 2 + 1 + 2 + 2 + 2), 4)
    return forward, backward


def forward_products(device: Device, batch: int, sequence: int, head_dim: int) -> float:
    """Scores and their weighted sum, each head a separate product."""
    return _batched_s(device, batch, sequence, sequence, head_dim) + _batched_s(
        device, batch, sequence, head_dim, sequence
    )


def _batched_s(device: Device, batch: int, rows: int, columns: int, inner: int) -> float:
    """A batch of equal products, whose tiles share the device: as one product of all their rows."""
    moved = 2.0 * batch * (rows * inner + inner * columns + rows * columns)
    return max(matmul_s(device, batch * rows, columns, inner, wide=True), memory_s(device, moved))


def _elementwise_s(job: Job, device: Device, software: Software) -> tuple[float, float]:
    """Norms, residuals, rotation and activation: passes over the stream, the queries and keys, and the inner width."""
    model, tp = job.model, job.layout.tp
    tokens = tokens_of(job)
    if device.operations is not None and software.fusion == "eager":
        return device.operations.block(job, tokens)
    stream = 2.0 * tokens * model.width / (tp if job.layout.sp else 1)
    turned = 2.0 * tokens * (model.heads // tp + kv_heads_of(job)) * model.head_dim
    if model.latent is not None:  # only a part of a head turns, and all of it is put together with the rest
        turned *= 2.0
    inner = 2.0 * tokens * feedforward_width(model) / tp
    fused = software.fusion == "fused"
    # Eager norms run in 32 bits, with casts before and after; an unfused RMSNorm is several operations.
    norm, norm_back = (2, 3) if fused else (5, 7) if model.norm == "layernorm" else (7, 10)
    moved = 2 * norm * stream + 2 * 3 * stream
    moved_back = 2 * norm_back * stream + 2 * 2 * stream
    if model.positions == "rope":
        moved += (2 if fused else 7) * turned
        moved_back += (2 if fused else 7) * turned
    if model.qk_norm:
        moved += (0 if fused else norm) * turned  # fused, rotation reads what it writes
        moved_back += (1 if fused else norm_back) * turned
    if model.activation == "swiglu":
        gate_fused = fused and software.fused_gate
        moved += (3 if gate_fused else 5) * inner
        moved_back += (5 if gate_fused else 9) * inner + recomputes_swiglu(job, software) * inner
    else:
        moved += 2 * inner
        moved_back += 3 * inner
    if software.own and not fused:
        # Our eager blocks: the input of several projections gets their gradients one after the other, and the gradients
        # of 32-bit norms, rotations and gates are computed, cast and summed separately. An H200 took half as long
        # again.
        moved_back *= 1.5
    if model.linear_bias and not software.own:
        # Gradients of biases are sums over tokens: each reads what the backward of its product reads.
        moved_back += sum(2.0 * rows * columns for rows, columns, _ in products_of(job, software))
    if model.dropout > 0:
        moved += 2 * 0.5 * stream
        moved_back += 2 * 1.5 * stream
    return memory_s(device, moved, 6), memory_s(device, moved_back, 10)


def recomputes_swiglu(job: Job, software: Software) -> bool:
    """Whether the backward of dense feed-forwards computes SwiGLU's result again: `FeedForward` does where their last
    projection is a trained matrix in 16 bits or more."""
    plain = job.precision.format != "fp8" and job.model.adapter is None
    fused = software.own and software.fusion == "fused" and job.layout.tp == 1
    return plain and fused and software.lean_blocks and job.model.activation == "swiglu"


_LOSS_BYTES = {"whole": (14.0, 16.0), "chunked": (46.0, 0.0)}
"""Bytes moved for each logit, forward and backward: 16-bit logits widened to 32 bits, reduced, exponentiated, narrowed;
ours computes both gradients chunk by chunk in the forward, each operation in place."""


def head_work(job: Job, device: Device, software: Software) -> Work:
    """Final norm, head and loss over one micro-batch; the vocabulary is shared by the tensor-parallel ranks.

    Of pairs the logits are computed twice: for the sums of the answers, and for the gradients.
    """
    model, tokens = job.model, tokens_of(job)
    vocabulary = -(-model.vocab_size // job.layout.tp)
    chunks, rows = 1, tokens
    if software.logit_bytes is None:
        chunks, rows = loss_chunks(job)
    if software.own and device.operations is None:
        vocabulary = in_whole_lines(vocabulary)
    wide = not (device.compute == "fp8" and job.precision.fp8_head and software.own)
    product = matmul_s(device, rows, vocabulary, model.width, wide=wide)
    inputs = matmul_s(device, rows, model.width, vocabulary, wide=wide, kind="input")
    weights = matmul_s(device, vocabulary, model.width, rows, wide=wide, kind="weight sum" if wide else "weight")
    if model.adapter is not None:
        weights = 0.0
    elif chunks > 1 and device.measured is None:  # every chunk reads and writes the whole matrix's gradient
        weights += memory_s(device, 8.0 * vocabulary * model.width)
    logits = rows * vocabulary
    if not wide:  # casts of a chunk's operands; the weight's, once; and a product that is added, not summed in place
        product += memory_s(device, 7.0 * rows * model.width + 7.0 * vocabulary * model.width / chunks, 8)
        inputs += memory_s(device, 6.0 * logits, 4)
        weights += memory_s(device, 12.0 * vocabulary * model.width)
    forward_bytes, backward_bytes = _LOSS_BYTES["whole" if software.logit_bytes else "chunked"]
    loss = memory_s(device, forward_bytes * logits, 4)
    if device.measured is not None and software.logit_bytes is None:
        loss = device.measured.loss_s(device.wide, rows, vocabulary) or loss
    work = Work(
        forward_matmul=chunks * product,
        forward_elementwise=chunks * loss,
        input_matmul=chunks * inputs,
        weight_matmul=chunks * weights,
        backward_elementwise=memory_s(device, backward_bytes * logits * chunks, 3),
    )
    if job.prefers:
        again = memory_s(device, _LOSS_BYTES["whole"][0] * logits, 4)
        work += Work(forward_matmul=chunks * product, forward_elementwise=chunks * again)
    if device.operations is not None:
        forward, backward = device.operations.head(job, tokens, vocabulary)
        if job.precision.number_bytes < MASTER_BYTES:  # the matrix's gradient is summed wide, and narrowed
            forward += memory_s(device, (MASTER_BYTES + job.precision.number_bytes) * vocabulary * model.width)
        work += Work(forward_elementwise=forward, backward_elementwise=backward)
    return work


def loss_chunks(job: Job) -> tuple[int, int]:
    """Into how many chunks our head splits a micro-batch's tokens, and the tokens of one."""
    tokens, vocabulary = tokens_of(job), -(-job.model.vocab_size // job.layout.tp)
    rows = min(tokens, chunk_rows(tokens, vocabulary, job.precision.number_bytes))
    return -(-tokens // rows), rows


def embedding_work(job: Job, device: Device) -> Work:
    """Looking tokens up, and adding their gradients to the table's."""
    if job.model.adapter is not None:  # a frozen table has no gradient
        return Work(forward_elementwise=memory_s(device, 4.0 * tokens_of(job) * job.model.width, 2))
    if device.operations is not None:
        forward, backward = device.operations.embedding(job, tokens_of(job))
        return Work(forward_elementwise=forward, backward_elementwise=backward)
    entries = tokens_of(job) * job.model.width
    return Work(
        forward_elementwise=memory_s(device, 4.0 * entries, 2), backward_elementwise=memory_s(device, 8.0 * entries, 3)
    )
