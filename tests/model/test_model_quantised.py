"""Matrices in 4 and 8 bits: the codes that bitsandbytes makes, and a product that keeps nothing but them.

bitsandbytes.safetensors holds a matrix and what bitsandbytes 0.50.2 made of it on a CPU, under its own names.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from meshwright.job import Job
from meshwright.model.quantised import NORMAL_FLOAT, Packed, dequantise_nf4, dynamic_codes, quantise, tables
from meshwright.parallel import World, build

THEIRS = load_file(Path(__file__).parent / "bitsandbytes.safetensors")
WEIGHT = THEIRS["weight"]


def theirs() -> Packed:
    state = bytes(THEIRS["nf4.weight.quant_state.bitsandbytes__nf4"].tolist()).decode()
    offset = float(state.partition('"nested_offset": ')[2].partition("}")[0])
    scales = torch.cat((torch.tensor([offset]), THEIRS["nf4.weight.nested_absmax"]))
    return Packed(THEIRS["nf4.weight"].view(20, 512), THEIRS["nf4.weight.absmax"].view(20, 16), scales)


def test_codes_are_those_of_bitsandbytes() -> None:
    ours, other = quantise(WEIGHT, "nf4"), theirs()
    assert torch.equal(ours.codes, other.codes)
    assert torch.allclose(ours.scales, other.scales, rtol=3e-7, atol=0)
    assert torch.equal(torch.tensor(NORMAL_FLOAT), THEIRS["nf4.weight.quant_map"])
    assert torch.equal(dynamic_codes(), THEIRS["nf4.weight.nested_quant_map"])
    assert ours.absmax_OG is not None and other.absmax_OG is not None
    differ = ours.absmax_OG != other.absmax_OG
    assert differ.sum() <= 1
    # Of a scale between two codes bitsandbytes' kernel for CPUs may take the farther one.
    nested = ours.scales[1:].double()[torch.arange(320) // 256]
    wanted = (WEIGHT.float().view(-1, 64).abs().amax(1) - ours.scales[0]).double() / nested
    far = [(dynamic_codes().double()[p.flatten().long()] - wanted).abs() for p in (ours.absmax_OG, other.absmax_OG)]
    assert (far[0] <= far[1]).all()


def test_int8_codes_are_those_of_bitsandbytes() -> None:
    ours = quantise(WEIGHT, "int8")
    assert torch.equal(ours.codes, THEIRS["int8.weight"])
    assert torch.equal(ours.scales, THEIRS["int8.SCB"])
    assert torch.allclose(ours.weight(), WEIGHT.float(), atol=float(ours.scales.max()) / 254)


def test_their_codes_stand_for_what_they_say() -> None:
    assert torch.equal(theirs().weight(torch.bfloat16), THEIRS["nf4.dequantised"])


@pytest.mark.parametrize("first_row", [7, 14, 17])
def test_any_rows_and_blocks_are_made_from_their_own_codes(first_row: int) -> None:
    """256 scales, the first 16 rows, share one scale; of the rest another must be used."""
    packed = quantise(WEIGHT, "nf4")
    assert packed.absmax_OG is not None
    rows = slice(first_row, first_row + 3)
    part = dequantise_nf4(
        packed.codes[rows, 96:192], packed.absmax_OG[rows, 3:6], packed.scales, tables(), (first_row, 3, 16),
        torch.float32,
    )  # fmt: skip
    assert torch.equal(part, packed.weight()[rows, 192:384])


def test_quantising_follows_its_definition() -> None:
    """An independent quantiser: every number's nearest code, searched among all of them in float64."""
    packed = quantise(WEIGHT[:4], "nf4")
    numbers = torch.tensor(NORMAL_FLOAT, dtype=torch.float64)
    blocks = WEIGHT[:4].double().view(-1, 64)
    absmax = blocks.abs().amax(1)
    codes = (blocks[:, :, None] / absmax[:, None, None] - numbers).abs().argmin(-1).view(4, 512, 2)
    assert torch.equal(packed.codes.long(), codes[..., 0] * 16 + codes[..., 1])
    centred = absmax - absmax.mean()
    nested = centred.abs().max()
    scale_codes = (centred[:, None] / nested - dynamic_codes().double()).abs().argmin(-1)
    assert packed.absmax_OG is not None and torch.equal(packed.absmax_OG.flatten().long(), scale_codes)
    scales = dynamic_codes().double()[scale_codes] * nested + absmax.mean()
    rounded = numbers[codes].view(-1, 64) * scales[:, None]
    assert torch.allclose(packed.weight(torch.float64).view(-1, 64), rounded, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_zeros_stay_zeros(name: str) -> None:
    assert torch.equal(quantise(torch.zeros(2, 64), name).weight(), torch.zeros(2, 64))


SHAPE: dict[str, Any] = {
    "vocab_size": 50, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn_width": 128,
    "max_sequence_length": 32,
}  # fmt: skip


def job(base: str, **adapter: Any) -> Job:
    model = SHAPE | {"adapter": {"rank": 4, "base": base} | adapter}
    batch = {"sequence_length": 16, "global_batch": 2, "micro_batch": 2}
    return Job.model_validate({"model": model, "batch": batch, "run": {"device": "cpu"}})


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_a_backward_needs_no_weights_in_more_bits(base: str) -> None:
    engine, weights = build(job(base), World(torch.device("cpu")))
    kept: dict[int, int] = {}
    tokens = torch.arange(32).view(2, 16)

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in engine.modules[0].parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = engine.modules[0](tokens, tokens, 32)
    # What is neither a parameter nor a table is made from tokens: at most as much as 32 of them are wide.
    assert max(size for place, size in kept.items() if place not in parameters) <= 4 * 32 * 128
    loss.backward()
    codes = sum(t.numel() * t.element_size() for name, t in weights.frozen.items() if not t.is_floating_point())
    projections = 2 * (64 * 128 * 2 + 64 * 64 * 2 + 3 * 64 * 128)
    assert codes == (projections * (1 / 2 + 1 / 64) if base == "nf4" else projections)
