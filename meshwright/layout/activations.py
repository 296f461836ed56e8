"""What a rank keeps of a micro-batch from forward to backward: the model's own count, as the layout shards it."""

from collections.abc import Mapping
from functools import lru_cache
from math import lcm

from meshwright.cost import MODES, Mode, block_cost, decoder_cost, encoder_cost, remade_bytes
from meshwright.job import Job, Model
from meshwright.job.encoder import ENCODERS
from meshwright.layout.budget import BlockBytes, Holding, StageBytes
from meshwright.layout.encoder import recomputes_encoder
from meshwright.layout.stages import split_layers
from meshwright.pipeline import Kind, Table

BY_TENSOR = {
    "attention.q": "tp", "attention.k": "tp", "attention.v": "tp", "attention.out": "tp", "attention.lse": "tp",
    "attention.q_norm.input": "tp", "attention.q_norm.rstd": "tp",
    "attention.k_norm.input": "tp", "attention.k_norm.rstd": "tp",
    "ffn.gate": "tp", "ffn.up": "tp", "ffn.activated": "tp", "ffn.product": "tp",
    "ffn.sigmoid": "tp",
    "shared.gate": "tp", "shared.up": "tp", "shared.activated": "tp", "shared.product": "tp", "shared.input": "",
    "moe.input": "tp", "moe.scores": "tp", "moe.weights": "tp", "moe.chosen": "tp", "moe.order": "tp",
    "moe.place": "tp", "moe.rows": "tp", "moe.gate_up": "tp", "moe.activated": "tp", "moe.product": "tp",
    "moe.out": "tp", "moe.unnormalised": "tp", "moe.sums": "tp", "moe.router": "",
    "attention.input": "", "attention.mask": "", "ffn.input": "",
    "attention.q_low": "", "attention.q_down_norm.input": "", "attention.q_down_norm.rstd": "",
    "attention.kv_low": "", "attention.kv_down_norm.input": "", "attention.kv_down_norm.rstd": "",
    "attention.values": "tp", "attention.kv": "tp", "attention.kv_down": "", "attention.k_rope": "",
    "attention.q_down": "", "moe.logits": "tp", "shared.projected": "",
    "attention.projected": "", "ffn.projected": "",
    "input": "sp", "attention_dropout": "sp", "ffn_dropout": "sp",
    "attention_norm.input": "sp", "attention_norm.mean": "sp", "attention_norm.rstd": "sp",
    "ffn_norm.input": "sp", "ffn_norm.mean": "sp", "ffn_norm.rstd": "sp",
    "final_norm.input": "sp", "final_norm.mean": "sp", "final_norm.rstd": "sp", "embed_dropout": "sp",
    "tokens": "", "positions": "", "cos": "", "sin": "",
    "head.hidden_gradient": "", "head.weight_gradient": "tp",
}  # fmt: skip
"""Which of a saved tensor's ranks share it: all tensor-parallel ones, those with sequence parallelism, or none. What
enters a pair of projections is gathered whole, and what leaves it is kept before it is summed over the ranks. Tensor-
parallel ranks route different tokens."""


def stages_of_rank(job: Job, table: Table | None, rank: int) -> list[tuple[range, StageBytes]]:
    """The layers of each stage a pipeline rank holds, and the bytes it keeps of them; `table` is None without one."""
    if table is None:
        return [(range(job.model.layers), _stage(job, job.model.layers, first=True, last=True))]
    layers = split_layers(job, table.stages // table.parameter_copies)
    stages = []
    for stage in table.stages_of(rank):
        chain = table.chain_of(stage)
        own = layers[stage - chain[0]]
        stages.append((own, _stage(job, len(own), first=stage == chain[0], last=stage == chain[-1])))
    return stages


def holdings_of_rank(table: Table | None, rank: int) -> list[Holding]:
    """The moments at which a rank holds the most micro-batches, as the number that each stage holds."""
    if table is None:
        return [(1,)]
    if rank not in table.holdings:
        table.holdings[rank] = _holdings(table, rank)
    return table.holdings[rank]


def _holdings(table: Table, rank: int) -> list[Holding]:
    stages = table.stages_of(rank)
    held, seen = [0] * len(stages), set[Holding]()
    for action in table.orders[rank]:
        change = {Kind.FORWARD: 1, Kind.INPUT: 0}.get(action.kind, -1)
        held[stages.index(action.stage)] += change
        seen.add(tuple(held))
    fullest: list[Holding] = []
    for one in sorted(seen, reverse=True):  # whatever covers another comes before it
        if not any(_covers(other, one) for other in fullest):
            fullest.append(one)
    return fullest


def _covers(more: Holding, less: Holding) -> bool:
    return all(a >= b for a, b in zip(more, less, strict=True))


def _stage(job: Job, blocks: int, *, first: bool, last: bool) -> StageBytes:
    layout, batch = job.layout, job.batch
    cut = (layout.tp, layout.sp, layout.cp, layout.cp_method)
    sizes = (job.model, batch.micro_batch, batch.sequence_length, job.precision.format)
    modes, fixed = _block_of_stage(*sizes, cut, first, last)
    return StageBytes(blocks, modes, fixed)


@lru_cache(maxsize=1024)
def _block_of_stage(
    model: Model,
    micro_batch: int,
    sequence: int,
    compute: str,
    cut: tuple[int, bool, int, str],
    first: bool,
    last: bool,
) -> tuple[Mapping[Mode, BlockBytes], int]:
    """A block in every mode, and what its stage holds beside its blocks; a search asks for the same many times."""
    bare = Job()
    sections = {
        "batch": {"micro_batch": micro_batch, "sequence_length": sequence},
        "layout": dict(zip(("tp", "sp", "cp", "cp_method"), cut, strict=True)),
        "precision": {"compute": compute},
    }
    update = {name: getattr(bare, name).model_copy(update=fields) for name, fields in sections.items()}
    job = bare.model_copy(update={"model": model} | update)
    per_mode = {mode: saved_by_name(job, mode, first=first, last=last) for mode in MODES}
    block = {mode: {name: size for (place, name), size in sizes.items() if place} for mode, sizes in per_mode.items()}
    fixed = sum(size for (place, _), size in per_mode["none"].items() if not place)
    sent = 0 if last else block["full"]["input"]  # the pipeline holds a stage's result until its gradient is there
    modes = {
        mode: BlockBytes(
            sum(kept.values()), 0 if mode == "none" else remade_bytes(block["none"], kept), _again(job, mode)
        )
        for mode, kept in block.items()
    }
    return modes, fixed + sent


def saved_by_name(job: Job, mode: Mode, *, first: bool, last: bool) -> Mapping[tuple[str, str], int]:
    """A rank's bytes of every tensor a stage of one layer saves, by ("layers.0." or "", name within)."""
    layout, sequence = job.layout, job.batch.sequence_length // job.layout.cp
    parts = {"tp": layout.tp, "sp": layout.tp if layout.sp else 1, "": 1}
    sizes_of = (job.model, job.batch.micro_batch, sequence, job.precision.number_bytes)
    # Of a mixture a layer with experts: the first ones may have none.
    layer = job.model.layers - 1
    cost = decoder_cost(*sizes_of, {layer: mode}, layers=range(layer, layer + 1), first=first, last=last)
    whole = {name.replace(f"layers.{layer}.", "layers.0."): size for name, size in cost.saved_bytes.items()}
    sizes = {}
    for full_name, size in whole.items():
        place = "layers.0." if full_name.startswith("layers.0.") else ""
        name = full_name.removeprefix(place)
        if name == "attention.mask" and layout.cp > 1:
            continue  # attention over a shared sequence rebuilds its masks
        sizes[place, name] = -(-size // parts[_shared_by(name)])
    if layout.cp > 1 and layout.cp_method == "ulysses" and mode == "none":  # as it was computed, and as it was returned
        sizes["layers.0.", "attention.returned"] = sizes["layers.0.", "attention.out"]
    if job.model.kv_heads % layout.tp:  # then every rank has a key-value head for each of its queries
        for name in ("attention.k", "attention.v"):
            if (unshared := whole.get(f"layers.0.{name}")) is not None:  # full recomputation keeps neither
                sizes["layers.0.", name] = sizes["layers.0.", "attention.q"] if mode == "none" else unshared
    if mode == "none":  # what attention sees; recomputation keeps what was projected
        for name in ("attention.k", "attention.v"):
            sizes["layers.0.", name] *= kv_copies(job)
    return sizes


def encoder_bytes(job: Job) -> int:
    """A rank's bytes of what an encoder and its projector keep of a micro-batch; 0 without one."""
    encoder = job.model.encoder
    if encoder is None:
        return 0
    sizes = (job.model, encoder, job.batch.micro_batch, job.precision.number_bytes)
    kept = encoder_cost(*sizes, recomputed=recomputes_encoder(job)).within(encoder.section).saved_bytes
    return sum(-(-size // (job.layout.tp if _shared_by(name) == "tp" else 1)) for name, size in kept.items())


def _shared_by(name: str) -> str:
    """Which of a saved tensor's ranks share it, as BY_TENSOR has it; items are encoded whole on every rank."""
    section, _, inside = name.partition(".")
    if section in ENCODERS:
        if inside in ("projector.inner", "projector.activated"):
            return "tp"
        found = BY_TENSOR.get(inside.split(".", 2)[2], "") if inside.startswith("layers.") else ""
        return "tp" if found == "tp" else ""
    return BY_TENSOR[name] if name in BY_TENSOR else _of_adapter(name)


def _of_adapter(name: str) -> str:
    """As BY_TENSOR, of what adapters save: only the wide sides of sharded projections are shared."""
    module, _, kind = name.rpartition(".")
    by_inputs = module.endswith((".o", ".down"))
    if kind == "dropped":
        return "tp" if by_inputs else ""
    whole = by_inputs or module.endswith(("_down", ".k_rope"))
    return "tp" if kind == "unscaled" and not whole else ""


def _again(job: Job, mode: Mode) -> int:
    """FLOPs of a block's forward that its backward repeats, over all ranks that share it."""
    sizes = (job.model, job.batch.micro_batch, job.batch.sequence_length, job.precision.number_bytes)
    return block_cost(*sizes, mode).backward_flops - block_cost(*sizes).backward_flops


def kv_heads_of(job: Job) -> int:
    """Key-value heads that one rank projects: as many as queries where tp does not divide them and copies them."""
    model, tp = job.model, job.layout.tp
    return model.kv_heads // tp if model.kv_heads % tp == 0 else model.heads // tp


def kv_copies(job: Job) -> int:
    """How often Ulysses repeats each of a rank's key-value heads: until there are as many for every rank of cp."""
    layout, held = job.layout, kv_heads_of(job)
    return lcm(held, layout.cp) // held if layout.cp_method == "ulysses" else 1
