"""What a block holds in each mode is what it states, storage by storage, and so are the FLOPs its backward repeats."""

from typing import Any

import pytest
import torch
from test_model_cost import NOT_COUNTED, SMALL, VARIANTS
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from meshwright.cost import KEPT_OPERATIONS, MODES, Cost, Mode, block_cost, decoder_cost
from meshwright.job.model import Model
from meshwright.model import Decoder, Draws, KVCache, initialise
from meshwright.parallel.recompute import apply_recompute

B, S = 2, 7
MIXES: dict[str, dict[int, Mode]] = {
    "full": {0: "full", 1: "full"},
    "selective": {0: "selective", 1: "selective"},
    "mixed": {0: "selective", 1: "none"},
    "segment": {0: "segment", 1: "joined"},
}


class Living(TorchDispatchMode):
    """Remembers every storage made, and says how many bytes of them still live, but for those known before.

    The loss and the numbers that key dropout live too: nothing else is as small.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._known:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def nbytes(self) -> int:
        return sum(size for made, size in self._made.values() if size > 16 and not made.expired())


def decoder(variant: str, modes: dict[int, Mode], dtype: torch.dtype) -> Decoder:
    model = Decoder(Model(**SMALL | VARIANTS[variant])).to(dtype)
    initialise(model, 0)
    apply_recompute(model, modes, keep_last=model.shape.dropout > 0.0)
    return model


def inputs() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, 29, (B, S), generator=draw) for _ in range(2))
    return {"x": tokens, "labels": labels, "valid_count": B * S, "draws": Draws(0, 0, torch.arange(B))}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_stated_bytes_are_those_that_live_after_the_forward(variant: str, mix: str, dtype: torch.dtype) -> None:
    model, given = decoder(variant, MIXES[mix], dtype), inputs()
    with Living([*model.parameters(), *model.buffers(), given["x"], given["labels"]]) as living:
        loss = model(**given)
    stated = dict(decoder_cost(model.shape, B, S, dtype.itemsize, MIXES[mix]).saved_bytes)
    del stated["tokens"]  # made before
    assert living.nbytes() == sum(stated.values()), stated
    assert loss.grad_fn is not None


@pytest.mark.thorough
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_stated_flops_are_those_the_backward_repeats(variant: str, mix: str) -> None:
    model = decoder(variant, MIXES[mix], torch.float32)
    loss = model(**inputs())
    with FlopCounterMode(display=False, custom_mapping=NOT_COUNTED) as counted:
        loss.backward()
    assert counted.get_total_flops() == decoder_cost(model.shape, B, S, 4, MIXES[mix]).backward_flops


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("variant", ["llama", "gpt2 dropout"])
def test_gradients_are_bit_for_bit_those_without_recomputation(variant: str, mix: str) -> None:
    seen = []
    for modes in ({0: "none", 1: "none"}, MIXES[mix]):
        model = decoder(variant, modes, torch.float64)  # type: ignore[arg-type]
        model(**inputs()).backward()
        seen.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*seen, rtol=0, atol=0)


def test_the_table_decides_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One activation more a block when silu's result is kept, one feed-forward width less when no projection is."""

    def living_bytes() -> int:
        model, given = decoder("llama", MIXES["selective"], torch.float32), inputs()
        with Living([*model.parameters(), given["x"], given["labels"]]) as living:
            loss = model(**given)
        size = living.nbytes()
        loss.backward()
        return size

    usual, inner = living_bytes(), B * S * SMALL["ffn_width"] * 4
    monkeypatch.setitem(KEPT_OPERATIONS, "aten.silu", "the activation function")
    assert living_bytes() == usual + 2 * inner
    monkeypatch.delitem(KEPT_OPERATIONS, "aten.silu")
    monkeypatch.delitem(KEPT_OPERATIONS, "aten.mm")
    block = block_cost(Model(**SMALL), B, S, 4, "selective")
    kept = {"input", "attention.out", "attention.lse"}
    assert living_bytes() == usual - 2 * sum(size for name, size in block.saved_bytes.items() if name not in kept)


def test_nothing_is_recomputed_without_gradients() -> None:
    """Generation adds to a cache, which a second run of the forward would do twice."""
    model = decoder("llama", MIXES["full"], torch.float32)
    tokens, cache = inputs()["x"], KVCache()
    with torch.no_grad():
        model(tokens[:, :4], cache=cache)
        logits = model(tokens[:, 4:], cache=cache)
        torch.testing.assert_close(logits, model(tokens)[:, 4:])
    assert cache.length == S


def test_a_stage_recomputes_by_the_numbers_of_its_layers() -> None:
    """A later stage's first block is not layer 0; what is recomputed instead would give the same numbers."""
    model = Decoder(Model(**SMALL | {"layers": 4}))
    initialise(model, 0)
    del model.layers["0"]
    apply_recompute(model, {0: "full", 1: "none", 2: "full", 3: "none"}, keep_last=False)
    runs: list[str] = []
    for name, block in model.layers.items():
        block.attention.register_forward_pre_hook(lambda *_, name=name: runs.append(name))
    model(**inputs()).backward()
    assert sorted(runs) == ["1", "2", "2", "3"]


def test_a_segment_keeps_its_input_and_the_last_may_be_shorter() -> None:
    """Five blocks of a stage in segments of two: three inputs are kept, and every block runs twice."""
    modes: dict[int, Mode] = {1: "segment", 2: "joined", 3: "segment", 4: "joined", 5: "segment"}
    model = Decoder(Model(**SMALL | {"layers": 6}))
    initialise(model, 0)
    del model.layers["0"]
    apply_recompute(model, modes, keep_last=False)
    runs: list[str] = []
    for name, block in model.layers.items():
        block.attention.register_forward_pre_hook(lambda *_, name=name: runs.append(name))
    given = inputs()
    with Living([*model.parameters(), given["x"], given["labels"]]) as living:
        loss = model(**given)
    cost = decoder_cost(model.shape, B, S, 4, modes, layers=range(1, 6))
    assert living.nbytes() == cost.saved_total - cost.saved_bytes["tokens"]
    assert sum(size for name, size in cost.saved_bytes.items() if name.startswith("layers.")) == 3 * B * S * 24 * 4
    with FlopCounterMode(display=False, custom_mapping=NOT_COUNTED) as counted:
        loss.backward()
    assert counted.get_total_flops() == cost.backward_flops
    assert runs == ["1", "2", "3", "4", "5", "5", "3", "4", "1", "2"]


def test_names_stay() -> None:
    assert list(decoder("llama", MIXES["selective"], torch.float32).state_dict()) == list(
        Decoder(Model(**SMALL)).state_dict()
    )


def test_costs_say_what_a_mode_gives_up() -> None:
    none, selective, full = (block_cost(Model(**SMALL), B, S, 2, mode) for mode in MODES)
    down = 2 * B * S * 20 * 24
    assert none.saved_total > selective.saved_total > full.saved_total == B * S * 24 * 2
    assert selective.backward_flops == none.backward_flops
    assert full.backward_flops == none.backward_flops + none.forward_flops - down
    assert isinstance(full, Cost) and full.forward_flops == none.forward_flops
