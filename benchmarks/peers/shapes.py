"""What is measured: a model's shape and a batch, defined once for all systems. Nothing here imports torch."""

from dataclasses import dataclass

CLIP = 1.0
LEARNING_RATE = 3e-4
BALANCE_RATE = 1e-3  # of experts without a loss: torchtitan's default; transformers has no such thing
NORM_EPS = 1e-5
ROPE_THETA = 500_000.0
ROPE_FACTOR = 32.0  # Llama 3.2's stretching of rotary frequencies, in every setting; it costs no time


@dataclass(frozen=True)
class Setting:
    """One model under one batch on one device."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn_width: int
    vocab_size: int
    sequence_length: int
    micro_batch: int
    tied: bool
    recompute: str = "none"
    """none, or full: what each block computes between its input and output is computed again in backward."""
    ours: tuple[str, ...] = ()
    """Further fields of our job."""
    systems: tuple[str, ...] = ("ours", "transformers", "torchtitan")
    """Measured unless --systems says otherwise."""
    compute: str = "bf16"
    compile: bool = True
    device: str = "cuda"
    head_dim: int | None = None
    """The width over the heads unless given."""
    experts: int = 0
    """Experts of every layer, in place of its feed-forward, whose width is ffn_width: Qwen3-MoE's block, with softmax
    scores divided by their sum and norms of queries and keys."""
    top_k: int = 0
    forced_balance: bool = False
    """Tokens are dealt to the experts in turn, whatever the router says."""

    @property
    def tokens_per_step(self) -> int:
        """Accumulation is 1."""
        return self.sequence_length * self.micro_batch


def _one_b(length: int, micro_batch: int, *, tied: bool, systems: tuple[str, ...] = Setting.systems) -> Setting:
    return Setting(16, 2048, 32, 8, 8192, 128256, length, micro_batch, tied, systems=systems)


def _mixture(layers: int, micro_batch: int, *, forced: bool = False, qwen: bool = False) -> Setting:
    """OLMoE's shape, or Qwen3-30B-A3B's, in fewer layers; both with the norms of Qwen3, which all systems have."""
    shape = (layers, 2048, 32, 4, 768, 151936) if qwen else (layers, 2048, 16, 16, 1024, 50304)
    return Setting(
        *(*shape, 4096, micro_batch, False), head_dim=128, experts=128 if qwen else 64, top_k=8, forced_balance=forced
    )


# As released, torchtitan's Llama has no tied head (torchtitan_train.py ties it in six lines of ours where a tied one is
# requested), so by default each peer is compared as it is released: transformers tied, torchtitan untied.
SETTINGS = {
    "1b-tied-mb8": _one_b(4096, 8, tied=True, systems=("ours", "transformers")),
    "1b-untied-mb8": _one_b(4096, 8, tied=False, systems=("ours", "torchtitan", "torchtitan-0.3")),
    "1b-tied-mb4": _one_b(4096, 4, tied=True, systems=("ours", "transformers")),
    "1b-untied-mb4": _one_b(4096, 4, tied=False, systems=("ours", "torchtitan", "torchtitan-0.3")),
    "1b-tied-mb1": _one_b(4096, 1, tied=True, systems=("ours",)),
    "gpt2": Setting(12, 768, 12, 12, 3072, 50257, 1024, 16, True, ours=('model.preset="gpt2"',), systems=("ours",)),
    "1b-16k": _one_b(16384, 2, tied=False),
    "1b-32k": _one_b(32768, 1, tied=False),
    "8b-8k": Setting(
        *(32, 4096, 32, 8, 14336, 128256, 8192, 1, False),
        recompute="full",
        ours=('precision.gradients="bf16"', 'memory.recompute="selective"'),
    ),
    "olmoe-mb4": _mixture(8, 4),
    "olmoe-mb8": _mixture(8, 8),
    "olmoe-mb4-forced": _mixture(8, 4, forced=True),
    "olmoe-mb8-forced": _mixture(8, 8, forced=True),
    "qwen3-30b-a3b-mb4": _mixture(6, 4, qwen=True),
    "tiny-mixture": Setting(
        *(2, 64, 4, 2, 32, 512, 64, 2, False),
        compute="fp32",
        compile=False,
        device="cpu",
        head_dim=16,
        experts=8,
        top_k=2,
    ),
    "tiny": Setting(2, 64, 4, 2, 128, 512, 64, 2, True, compute="fp32", compile=False, device="cpu"),
}
DEFAULT = ("1b-tied-mb8", "1b-untied-mb8")
