"""What a layer of experts must do at least: its products' FLOPs, and the bytes of every pass over memory between them.

    python benchmarks/moe_floor.py [--setting olmoe-mb8]

Bytes count each input read once and each output written once, with 2 bytes a number. A gather reads a row for every row
that it writes: 8 experts of a token are in 8 places, and together they do not fit into a cache. The floor is the larger
of FLOPs over 650 TFLOP/s, which bf16 products of these shapes reach on an H200 (attention 470), and bytes over
4.0 TB/s, kernel after kernel.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from shapes import SETTINGS, Setting

FLOPS_PER_S, ATTENTION_FLOPS_PER_S, BYTES_PER_S = 650e12, 470e12, 4.0e12
UPDATE_BYTES = 30
"""A parameter's: master and two moments read and written, gradient in bf16 read twice, working copy written."""


@dataclass(frozen=True)
class Part:
    """One kernel, or several of one kind."""

    name: str
    group: str
    flops: float = 0.0
    bytes: float = 0.0
    flops_per_s: float = FLOPS_PER_S

    @property
    def seconds(self) -> float:
        """At least."""
        return max(self.flops / self.flops_per_s, self.bytes / BYTES_PER_S)


def layer_parts(setting: Setting) -> list[Part]:
    """A layer's experts, forward and backward; bytes of products are listed, and hidden behind their FLOPs."""
    tokens, width, inner = setting.tokens_per_step, setting.width, setting.ffn_width
    rows = tokens * setting.top_k
    token, row, gate_up, half = 2 * tokens * width, 2 * rows * width, 4 * rows * inner, 2 * rows * inner
    up, down = 4.0 * rows * width * inner, 2.0 * rows * width * inner
    router = 2.0 * tokens * width * setting.experts
    return [
        Part("router: product, scores, choice, sort", "routing", router, token),
        Part("gather tokens to rows", "rows", bytes=2 * row),
        Part("gate and up", "experts' products", up, row + gate_up),
        Part("silu(gate) × up × weight", "swiglu", bytes=gate_up + half),
        Part("down", "experts' products", down, half + row),
        Part("sum of a token's rows", "rows", bytes=row + token),
        Part("backward: gather the sum's gradient", "rows", bytes=2 * row),
        Part("backward: gradient of down's input", "experts' products", down, row + half),
        Part("backward: gradient of down's weights", "experts' products", down, row + half),
        Part("backward: swiglu and its weights", "swiglu", bytes=half + 2 * gate_up),
        Part("backward: gradient of gate's and up's input", "experts' products", up, gate_up + row),
        Part("backward: gradient of gate's and up's weights", "experts' products", up, gate_up + row),
        Part("backward: sum of a token's rows' gradients", "rows", bytes=row + token),
        Part("backward: router", "routing", 4 * router, 4 * token),
    ]


def other_parts(setting: Setting, parameters: int) -> list[Part]:
    """The rest of a step; attention counts the visible half and, in backward, 2.5 times the forward."""
    tokens, width = setting.tokens_per_step, setting.width
    head_dim = setting.head_dim or width // setting.heads
    projections = width * head_dim * (2 * setting.heads + 2 * setting.kv_heads)
    seen = 2.0 * setting.sequence_length * head_dim * setting.heads
    norms = 2 * tokens * width * 22  # two norms, norms of heads, rotations, residual sums, forward and backward
    return [
        Part("attention's projections", "other products", 6.0 * tokens * projections * setting.layers),
        Part("attention", "attention", 3.5 * tokens * seen * setting.layers, 0.0, ATTENTION_FLOPS_PER_S),
        Part("head", "other products", 6.0 * tokens * width * setting.vocab_size),
        Part("loss", "loss", bytes=3.0 * 2 * tokens * setting.vocab_size),
        Part("norms, rotations and sums", "elementwise", bytes=norms * setting.layers),
        Part("norm and update of parameters", "optimizer", bytes=float(UPDATE_BYTES * parameters)),
    ]


def parameters_of(setting: Setting) -> int:
    """Of all experts."""
    head_dim = setting.head_dim or setting.width // setting.heads
    attention = setting.width * head_dim * (2 * setting.heads + 2 * setting.kv_heads)
    experts = 3 * setting.width * setting.ffn_width * max(1, setting.experts) + setting.width * setting.experts
    return setting.layers * (attention + experts) + 2 * setting.vocab_size * setting.width


def step_seconds(setting: Setting) -> dict[str, float]:
    """The floor of a step by group."""
    found: dict[str, float] = {}
    for part in layer_parts(setting):
        found[part.group] = found.get(part.group, 0.0) + part.seconds * setting.layers
    for part in other_parts(setting, parameters_of(setting)):
        found[part.group] = found.get(part.group, 0.0) + part.seconds
    return found


def main() -> None:
    """The table of a setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mixtures = [name for name, each in SETTINGS.items() if each.experts]
    parser.add_argument("--setting", choices=mixtures, default="olmoe-mb8")
    setting = SETTINGS[parser.parse_args().setting]
    print(f"| one layer of experts, {setting.tokens_per_step:,} tokens | GFLOP | MB | ms |\n|---|---|---|---|")
    for part in layer_parts(setting):
        print(f"| {part.name} | {part.flops / 1e9:,.0f} | {part.bytes / 1e6:,.0f} | {1e3 * part.seconds:.2f} |")
    for part in other_parts(setting, parameters_of(setting)):
        print(f"| *step:* {part.name} | {part.flops / 1e9:,.0f} | {part.bytes / 1e6:,.0f} | {1e3 * part.seconds:.2f} |")
    total = sum(step_seconds(setting).values())
    print(f"| **step** | | | **{1e3 * total:.1f}** ({setting.tokens_per_step / total:,.0f} tokens/s) |")


if __name__ == "__main__":
    main()
