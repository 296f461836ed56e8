"""Sums of the lectures that no command prints, done with this program's own formulas and tables.

python tests/docs/lecture_sums.py NAME      prints one of them; docs/lectures.md says which answers what
"""

import sys
from collections.abc import Callable
from math import ceil, log2

from meshwright.cost import (
    MASTER_BYTES,
    attention_cost,
    block_cost,
    feedforward_cost,
    flops_per_token,
    head_cost,
    matmul_parameters,
    parameter_count,
    state_bytes,
)
from meshwright.hardware import gpu_by_key, known_sites, mfu_peak_flops, peak_flops
from meshwright.job import Job, Model, load_job, model_preset
from meshwright.job.devices import Cluster
from meshwright.plan import predict

DAY_S = 86400
GB = 1e9


def shape_of(name: str, **changed: int) -> Model:
    """A preset's shape, some of it changed."""
    return Model.model_validate({"preset": name, **model_preset(name), **changed})


def _short(number: float) -> str:
    return f"{number:.2e}".replace("e+", "e")


def llama_3_8b_compute() -> list[str]:
    """15T tokens at S 8192, on A100s that reach 40% of their peak."""
    lines = []
    peak = peak_flops(gpu_by_key("a100-40gb"), "bf16")
    assert peak is not None
    for attention in ("causal", "full"):
        flops = flops_per_token(shape_of("llama-3-8b"), 8192, attention) * 15e12
        days = flops / (0.4 * peak) / DAY_S
        lines.append(
            f"{attention}: {_short(flops)} FLOP, {days:,.0f} A100 days at 40%, {days / 480:.0f} days of 60 × 8"
        )
    return lines


def growth() -> list[str]:
    """What doubling B, S, D and L does to a stack of blocks: FLOPs, parameters, bytes kept for the backward."""
    plain = {"width": 2048, "layers": 8, "heads": 16, "kv_heads": 16, "head_dim": 128, "ffn_width": 8192}
    doubled = {
        "B": {}, "S": {}, "L": {"layers": 16},
        "D": {"width": 4096, "heads": 32, "kv_heads": 32, "ffn_width": 16384},
    }  # fmt: skip

    def costs(batch: int, sequence: int, shape: dict[str, int]) -> list[float]:
        model = Model.model_validate({"vocab_size": 1024, **shape})
        block = block_cost(model, batch, sequence, 2)
        scores = 2 * batch * model.heads * sequence**2  # 16-bit scores that an unfused attention keeps
        per_block = (block.forward_flops, block.parameters, block.saved_total, block.saved_total + scores)
        return [model.layers * cost for cost in per_block]

    lines = []
    for sequence in (4096, 65536):
        before = costs(2, sequence, plain)
        for name, change in doubled.items():
            after = costs(4 if name == "B" else 2, sequence * (2 if name == "S" else 1), {**plain, **change})
            flops, parameters, flash, naive = (a / b for a, b in zip(after, before, strict=True))
            lines.append(
                f"twice {name} at S {sequence}: FLOPs {flops:.2f}×, parameters {parameters:.2f}×, "
                f"activations {flash:.2f}× fused, {naive:.2f}× with scores kept"
            )
    return lines


def fixed_tokens() -> list[str]:
    """Total compute over a fixed number of tokens, and a sample's, as S grows by equal steps."""
    per_token = [flops_per_token(shape_of("llama-3-8b"), sequence, "full") for sequence in (4096, 8192, 12288)]
    per_sample = [each * sequence for each, sequence in zip(per_token, (4096, 8192, 12288), strict=True)]
    lines = []
    for what, (a, b, c) in (("fixed tokens", per_token), ("a sample", per_sample)):
        lines.append(f"{what}: S 4k to 8k adds {b - a:.3g} FLOP, 8k to 12k {(c - b) / (b - a):.2f} times as much")
    return lines


def shares() -> list[str]:
    """Which part of parameters and forward FLOPs is in the MLPs and in the head, at S 4096."""
    lines = []
    for name in ("llama-3.2-1b", "llama-3-8b", "llama-3-70b"):
        shape, sizes = shape_of(name), (1, 4096, 2)
        mlp, attention = feedforward_cost(shape, *sizes), attention_cost(shape, *sizes)
        # A head's forward makes its gradients too, so a third of it is the product itself.
        head = head_cost(shape, *sizes).forward_flops / 3
        flops = shape.layers * (mlp.forward_flops + attention.forward_flops) + head
        parameters = shape.layers * mlp.parameters / parameter_count(shape)
        lines.append(
            f"{name}: MLPs have {parameters:.0%} of the parameters and {shape.layers * mlp.forward_flops / flops:.0%} "
            f"of the FLOPs, the head {head / flops:.1%}"
        )
    return lines


def vocabulary_in_the_bracket() -> list[str]:
    """The slide's formula against ours: its vocabulary term is multiplied by the layers."""
    lines = []
    for name, sequence in (("llama-3.2-1b", 4096), ("llama-3-8b", 8192)):
        shape = shape_of(name)
        width, of_width = shape.width, shape.layers * shape.width**2
        inside = 12 + 12 * shape.kv_heads / shape.heads + 18 * shape.ffn_width / width + 12 * sequence / width
        ours = flops_per_token(shape, sequence, "full")
        apart = abs(of_width * inside + 6 * shape.vocab_size * width - ours) / ours
        slide = of_width * (inside + 6 * shape.vocab_size / width)
        lines.append(f"{name}: the slide is {slide / ours:.2f}× ours; with the term outside {1 + apart:.2f}× ours")
    return lines


def model_bytes() -> list[str]:
    """Weights of the models the chapter names, in 16 and 32 bits."""
    lines = []
    for name in ("gpt2-xl", "gpt3-175b", "llama-2-70b", "llama-2-7b"):
        count = parameter_count(shape_of(name))
        lines.append(
            f"{name}: {count / 1e9:.2f}B parameters, {2 * count / GB:,.1f} GB in 16 bits, "
            f"{4 * count / GB:,.1f} GB in 32, {2 * count / 64 / GB:.2f} GB a share of 64, "
            f"{8 * 2 * count / 1e12:.2f} TB on 8 replicas"
        )
    return lines


def adam_bytes() -> list[str]:
    """Bytes a parameter of AdamW, from the formats of a bf16 job."""
    job = load_job("finetune-7b-4xa100").job
    moments = state_bytes(job, 1, 0)
    lines = [f"moments {moments:.0f} P, master weights {MASTER_BYTES:.0f} P, together {moments + MASTER_BYTES:.0f} P"]
    held = states_of(_on(1, 0))
    total = sum(held.values()) / parameter_count(job.model)
    return [*lines, f"with 16-bit weights and gradients {total:.1f} P"]


def overhead() -> list[str]:
    """What training takes next to the 16-bit weights of the 1B recipe on one H200; 8B in fp32 without activations."""
    job = load_job("pretrain-1b").job
    rank = predict(job, Cluster(gpu="h200")).memory[0]
    working, count = rank.terms["working weights"], parameter_count(job.model)
    kept = ("weights", "gradients", "optimizer states")
    wide = load_job("pretrain-1b", ["model.preset=llama-3-8b", "precision.compute=fp32", "batch.micro_batch=1"]).job
    whole = predict(wide, Cluster(gpu="h200")).memory[0].terms
    return [
        f"1B: {rank.device / working:.1f} times its 16-bit weights, "
        f"activations {rank.terms['activations'] / count:.1f} P",
        f"8B in fp32: {sum(whole[name] for name in kept) / GB:.1f} GB of weights, gradients and states",
    ]


def zero_table() -> list[str]:
    """The ZeRO table of a 7B model on 8 GPUs with 16-bit gradients, from the planner's terms; GB, P = 6.74e9."""
    lines = []
    whole = sum(states_of(_on(8, 0)).values())
    for zero in range(4):
        held = states_of(_on(8, zero))
        optimizer = (held["master"] + held["moments"]) / GB
        lines.append(
            f"zero {zero}: weights {held['weights'] / GB:.2f}, gradients {held['gradients'] / GB:.2f}, "
            f"optimizer with master {optimizer:.2f}, together {sum(held.values()) / GB:.2f} GB, "
            f"{whole / sum(held.values()):.1f} times less"
        )
    return lines


def zero_pair() -> list[str]:
    """The chapter's two GPUs with W1 … W4: gradients and optimizer (master included) of each, in bytes a parameter."""
    lines = []
    for zero in (1, 2):
        job = _on(2, zero)
        held, count = states_of(job), parameter_count(job.model)
        optimizer = held["master"] + held["moments"]
        lines.append(
            f"zero {zero} on 2: gradients {held['gradients'] / count:.1f} P, optimizer {optimizer / count:.1f} P"
        )
    return lines


def states_of(job: Job) -> dict[str, float]:
    """Bytes a rank holds for weights, gradients, master weights and moments: terms of the planner's prediction.

    Zero 1 reduces gradients once a step and holds them whole until then.
    """
    ranks = job.layout.dp_replicate * job.layout.dp_shard
    terms = predict(job, Cluster(gpu="a100-80gb", gpus_per_node=ranks)).memory[0].terms
    return {
        "weights": terms.get("working weights", 0.0),
        "gradients": terms["gradients before they are reduced" if job.layout.zero_stage == 1 else "gradients"],
        "master": terms["weights"],
        "moments": terms["optimizer states"],
    }


def _on(ranks: int, zero: int) -> Job:
    data = {"dp_replicate": ranks, "dp_shard": 1} if zero == 0 else {"dp_shard": ranks}
    layout = [f"layout.{field}={value}" for field, value in {**data, "zero": zero}.items()]
    batch = ["batch.micro_batch=1", f"batch.global_batch={2 * ranks}"]
    return load_job("finetune-7b-4xa100", [*layout, *batch, "precision.gradients=bf16"]).job


def ring() -> list[str]:
    """Rings of 8 and 64 played out with 1 GB on each rank; the sums are checked."""
    lines = []
    for ranks in (8, 64):
        rounds, sent = _ring_all_reduce(ranks)
        lines.append(f"{ranks} ranks: {sent:.2f} GB sent by each, {rounds} rounds, half of both in the reduce-scatter")
    return lines


def _ring_all_reduce(ranks: int) -> tuple[int, float]:
    data = [[float(rank + 10 * chunk) for chunk in range(ranks)] for rank in range(ranks)]
    expected = [sum(rank + 10 * chunk for rank in range(ranks)) for chunk in range(ranks)]
    rounds = 0
    for adds in (True, False):
        for turn in range(ranks - 1):
            sent = [((rank - turn + (0 if adds else 1)) % ranks, rank) for rank in range(ranks)]
            values = [data[rank][chunk] for chunk, rank in sent]
            for (chunk, rank), value in zip(sent, values, strict=True):
                right = data[(rank + 1) % ranks]
                right[chunk] = right[chunk] + value if adds else value
            rounds += 1
    assert all(row == expected for row in data)
    return rounds, rounds / ranks


def trees_and_rings() -> list[str]:
    """All-reduce by ring and by tree at 1 µs a round and 10 GB/s."""

    def milliseconds(ranks: int, size: float) -> tuple[float, float]:
        by_ring = 2 * (ranks - 1) * 1e-6 + 2 * (ranks - 1) / ranks * size * 1e-10
        return 1e3 * by_ring, 1e3 * (2 * ceil(log2(ranks)) * 1e-6 + 2 * size * 1e-10)

    lines = []
    for ranks, size, words in ((4, 1e9, "1 GB"), (1024, 1e9, "1 GB"), (1024, 1e6, "1 MB")):
        by_ring, by_tree = milliseconds(ranks, size)
        faster = "ring" if by_ring < by_tree else "tree"
        lines.append(f"{words} on {ranks}: ring {by_ring:.2f} ms, tree {by_tree:.2f} ms: {faster}")
    return lines


def topk() -> list[str]:
    """How many times fewer bytes top-k sends than a plain ring, from the encoder's own bytes, by replicas."""
    import torch

    from meshwright.parallel.compression.codecs import TopK

    lines = []
    for ratio in (0.1, 0.01):
        codec = TopK(ratio)
        numbers = torch.randn(64, codec.block)
        share = codec.encode(numbers).numel() / (4 * numbers.numel())
        # A ring moves 2(n-1)/n of the gradients, an all-gather n-1 times what each replica kept.
        by_replicas = ", ".join(f"{2 / n / share:.2f}× on {n}" for n in (2, 4, 8, 64))
        lines.append(f"topk {ratio:.0%}: {by_replicas}")
    return lines


def sixteen_bits() -> list[str]:
    """Range and precision of the 16-bit formats, as torch has them."""
    import torch

    lines = []
    for name, exponent in (("float16", 5), ("bfloat16", 8), ("float32", 8)):
        info = torch.finfo(getattr(torch, name))
        mantissa = round(-log2(info.eps))
        assert 1 + exponent + mantissa == info.bits
        largest = f"{info.max:,.0f}" if info.max < 1e6 else _short(info.max)
        lines.append(f"{name}: {exponent} exponent and {mantissa} mantissa bits, up to {largest}")
    return lines


def peaks_and_links() -> list[str]:
    """Dense rates and links of the GPUs the lectures name, both directions of a link together."""
    lines = []
    for key in ("a100-80gb", "h100", "h200", "rtx-3090"):
        gpu = gpu_by_key(key)
        formats = ("tf32", "bf16", "fp16", "int8", "fp8")
        rates = ", ".join(f"{name} {rate / 1e12:g}" for name in formats if (rate := peak_flops(gpu, name)))
        link = f"; links {2 * gpu.gpu_link.bytes_per_s / GB:g} GB/s" if gpu.gpu_link else ""
        lines.append(f"{key}: {rates} TFLOP/s{link}")
    return lines


def claims() -> list[str]:
    """What is saved by so many times the performance."""
    return [f"{times} times per dollar or watt saves {1 - 1 / times:.0%}" for times in (60, 30)]


def sites() -> list[str]:
    """GPUs of the sites' partitions."""
    return [f"{site.title}: {site.gpus_per_node} × {site.gpu} per node" for site in known_sites().values()]


def recipe_1() -> list[str]:
    """What recomputation and fused attention save in the 7B fine-tune; a score has 16 bits for each pair and head."""
    gib = 2.0**30
    four = Cluster(gpu="a100-80gb", gpus_per_node=4)
    recomputed, kept = (
        predict(load_job("finetune-7b-4xa100", [f"memory.recompute={mode}"]).job, four).memory[0].device / gib
        for mode in ("full", "none")
    )
    job = load_job("finetune-7b-4xa100").job
    scores = 2 * job.batch.micro_batch * job.model.heads * job.batch.sequence_length**2 / gib
    return [
        f"recomputation saves {kept - recomputed:.1f} GiB",
        f"scores of one block {scores:.1f} GiB: {1 + scores / recomputed:.2f}× the memory with recomputation",
        f"scores of {job.model.layers} blocks {job.model.layers * scores:.1f} GiB: "
        f"{1 + job.model.layers * scores / kept:.2f}× without",
    ]


def recipe_speeds() -> list[str]:
    """Which share of the GPUs' peak the chapter's expected speeds are."""
    lines = []
    for name, gpu, compute, rate in (
        ("pretrain-70b-64xh100", "h100", "bf16", 3.0),
        ("10b-2xrtx3090", "rtx-3090", "fp16", 0.2),
    ):
        job = load_job(name).job
        peak = mfu_peak_flops(gpu_by_key(gpu), compute)
        assert peak is not None
        share = rate * flops_per_token(job.model, job.batch.sequence_length, "full") / peak
        lines.append(f"{rate} tokens/s per GPU of {matmul_parameters(job.model) / 1e9:.0f}B is {share:.2%} of a {gpu}")
    fitting = load_job("lecture-2-70b-64xh100", ["batch.micro_batch=16"]).job
    rate = predict(fitting, fitting.cluster).tokens_per_s_per_gpu
    lines.append(f"recipe 2 with 16 sequences at a time: {64 * rate:,.0f} tokens/s in all")
    return lines


SUMS: dict[str, Callable[[], list[str]]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        llama_3_8b_compute, growth, fixed_tokens, shares, vocabulary_in_the_bracket, model_bytes, adam_bytes, overhead,
        zero_table, zero_pair, ring, trees_and_rings, topk, sixteen_bits, peaks_and_links, claims, sites,
        recipe_1, recipe_speeds,
    )
}  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write("\n".join(SUMS[sys.argv[1]]()) + "\n")
