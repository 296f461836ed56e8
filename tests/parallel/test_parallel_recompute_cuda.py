"""On a GPU: blocks hold what they state in every mode, and selective recomputation runs no attention kernel twice."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.cost import KEPT_OPERATIONS, MODES, Mode, decoder_cost
from meshwright.job.model import Model
from meshwright.model import Decoder, Documents, initialise
from meshwright.model.attention import Attention
from meshwright.model.feedforward import FeedForward
from meshwright.parallel.compiler_fixes import recompute_inside_functions
from meshwright.parallel.fp8 import use_fp8
from meshwright.parallel.recompute import apply_recompute

pytestmark = pytest.mark.gpu

SHAPE = Model(
    vocab_size=512, width=512, layers=3, heads=8, kv_heads=2, head_dim=64, ffn_width=1024, max_sequence_length=1024
)
B, S = 4, 1024


class Calls(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def decoder(mode: Mode) -> Decoder:
    model = Decoder(SHAPE).to("cuda", torch.bfloat16)
    initialise(model, 0)
    apply_recompute(model, dict.fromkeys(range(3), mode), keep_last=False)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, 512, (B, S), generator=torch.Generator().manual_seed(0)).cuda()


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_holds_what_is_stated(mode: Mode) -> None:
    model, given = decoder(mode), tokens()
    model(given, given, B * S).backward()  # kernels' own workspaces stay
    before = torch.cuda.memory_allocated()
    loss = model(given, given, B * S)
    held = torch.cuda.memory_allocated() - before
    stated = decoder_cost(SHAPE, B, S, 2, dict.fromkeys(range(3), mode)).saved_total - given.nbytes
    assert held == pytest.approx(stated, rel=0.01)
    assert loss.isfinite()


@pytest.mark.parametrize("masked", [False, True])
def test_attention_runs_again_only_with_full_recomputation(masked: bool) -> None:
    seen: dict[str, list[torch.Tensor]] = {}
    for mode in MODES:
        model, given = decoder(mode), tokens()
        documents = Documents(torch.arange(S, device="cuda").expand(B, S) // 300, at_most=4 * B) if masked else None
        loss = model(given, given, B * S, documents=documents)
        with Calls() as calls:
            loss.backward()
        again = sum(count for name, count in calls.seen.items() if name in KEPT_OPERATIONS and "att" in name)
        assert again == (3 if mode == "full" else 0), calls.seen
        seen[mode] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for mode in ("selective", "full"):
        torch.testing.assert_close(seen[mode], seen["none"], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_compiled_blocks_keep_nothing_but_their_input(precision: str) -> None:
    model, given = Decoder(SHAPE).to("cuda", torch.bfloat16), tokens()
    initialise(model, 0)
    if precision == "fp8":
        use_fp8(model.layers)
    apply_recompute(model, dict.fromkeys(range(3), "full"), keep_last=False)
    recompute_inside_functions()
    for module in model.modules():
        if isinstance(module, Attention | FeedForward):
            module.fused = True
    for block in model.layers.values():
        block.compile()
    model(given, given, B * S).backward()
    before = torch.cuda.memory_allocated()
    loss = model(given, given, B * S)
    held = torch.cuda.memory_allocated() - before
    stated = decoder_cost(SHAPE, B, S, 2, dict.fromkeys(range(3), "full")).saved_total - given.nbytes
    assert held == pytest.approx(stated, rel=0.02)
    assert loss.isfinite()
