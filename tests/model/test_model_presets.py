"""Public shapes have the public parameter counts, on the meta device and in closed form, and the known FLOPs."""

from typing import Literal

import pytest
import torch
from counting import counted_calls
from model_shapes import PRESETS, TINY, preset

from meshwright.cost import (
    active_parameters,
    block_tensors,
    decoder_cost,
    flops_per_token,
    matmul_parameters,
    parameter_count,
    tensor_count,
)
from meshwright.job import model_to_hf_config
from meshwright.model import Decoder

PUBLIC_COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # their preferences are counted there, and are no weights
}
PUBLIC_ACTIVE = {
    "mixtral-8x7b": 12.9e9,
    "mixtral-8x22b": 39e9,
    "olmoe-1b-7b": 1.3e9,
    "qwen3-30b-a3b": 3.3e9,
    "qwen3-235b-a22b": 22e9,
    "deepseek-v3": 37e9,
}
"""As their papers and pages round them."""
ACTIVE_WITHOUT_TABLE = {"gpt-oss-20b": 3.61e9, "gpt-oss-120b": 5.13e9, "deepseek-v2-lite": 2.4e9}
"""Those whose authors do not count the embedding."""
NAMED_AFTER_SIZE = {"gpt3-175b": 175e9, "10b": 10e9}


def test_every_preset_has_a_known_size() -> None:
    assert set(PRESETS) == {*PUBLIC_COUNTS, *NAMED_AFTER_SIZE, *TINY}


@pytest.mark.parametrize("name", PRESETS)
def test_closed_form_equals_the_built_model(name: str) -> None:
    with torch.device("meta"):
        built = Decoder(preset(name))
    count = sum(parameter.numel() for parameter in built.parameters())
    assert parameter_count(preset(name)) == count
    if preset(name).experts is None:
        assert decoder_cost(preset(name), 1, 8, 2).parameters == count
    assert tensor_count(preset(name)) == len(list(built.parameters()))
    for layer in (0, preset(name).layers - 1):
        block = {name: parameter.numel() for name, parameter in built.layers[str(layer)].named_parameters()}
        assert {name: tensor.elements for name, tensor in block_tensors(preset(name), layer).items()} == block
    if name in PUBLIC_COUNTS:
        assert count == PUBLIC_COUNTS[name]
    if name in NAMED_AFTER_SIZE:
        assert count == pytest.approx(NAMED_AFTER_SIZE[name], rel=0.01)


@pytest.mark.parametrize("name", [*PUBLIC_ACTIVE, *ACTIVE_WITHOUT_TABLE])
def test_a_token_uses_the_published_share_of_the_experts(name: str) -> None:
    shape = preset(name)
    table = shape.vocab_size * shape.width
    if name in PUBLIC_ACTIVE:
        assert active_parameters(shape) == pytest.approx(PUBLIC_ACTIVE[name], rel=0.02)
    else:
        assert active_parameters(shape) - table == pytest.approx(ACTIVE_WITHOUT_TABLE[name], rel=0.025)
    assert matmul_parameters(shape) == pytest.approx(active_parameters(shape) - table, rel=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "llama-2-7b", "llama-3-8b", "llama-3.2-1b", "mistral-7b", "qwen3-0.6b", "qwen3-8b", "mixtral-8x7b"),
        *("olmoe-1b-7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite", "deepseek-v3"),
    ],
)
def test_transformers_builds_the_same_size(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**model_to_hf_config(preset(name)))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == PUBLIC_COUNTS[name]


def test_the_largest_is_built_on_meta_with_a_few_calls_per_layer() -> None:
    """So that a plan or a rehearsal of it begins at once."""
    with torch.device("meta"):
        Decoder(preset("llama-3.1-8b"))  # what is imported and cached at the first time is not counted
        with counted_calls() as calls:
            model = Decoder(preset("llama-3.1-405b"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert calls.count < 2_500 * 126, calls


@pytest.mark.parametrize(("attention", "flops", "days"), [("causal", 7.72e23, 71_600), ("full", 8.69e23, 80_600)])
def test_llama_3_8b_on_15_trillion_tokens(attention: Literal["causal", "full"], flops: float, days: float) -> None:
    total = flops_per_token(preset("llama-3-8b"), 8192, attention) * 15e12
    assert total == pytest.approx(flops, rel=1e-3)
    assert total / (0.4 * 312e12) / 86400 == pytest.approx(days, rel=1e-3)


def test_matmul_parameters_leave_out_lookups_and_norms() -> None:
    shape = preset("llama-3-8b")
    norms = (2 * shape.layers + 1) * shape.width
    assert matmul_parameters(shape) == parameter_count(shape) - shape.vocab_size * shape.width - norms
    tied = preset("llama-3.2-1b")
    assert matmul_parameters(tied) == parameter_count(tied) - (2 * tied.layers + 1) * tied.width


def test_flops_per_token_count_values_narrower_than_keys() -> None:
    shape = preset("deepseek-v2-lite")
    attention = flops_per_token(shape, 4096, "full") - 6 * matmul_parameters(shape)
    assert attention == 6 * shape.layers * 4096 * shape.heads * (192 + 128)


def test_flops_per_token_count_what_a_mask_leaves() -> None:
    """Against counting the visible pairs one by one."""
    shape, sequence = preset("tiny-mistral"), 64
    seen = sum(min(token + 1, 16) for token in range(sequence)) / sequence
    attention = flops_per_token(shape, sequence, "causal") - 6 * matmul_parameters(shape)
    width = shape.heads * shape.head_dim
    assert attention == pytest.approx(12 * shape.layers * seen * width, rel=0.05)
    halves = preset("tiny-mistral", window_layers="alternate")
    both = flops_per_token(halves, sequence, "full") - 6 * matmul_parameters(halves)
    assert both == 12 * (16 + sequence) * width  # one layer with the window and one without
    plain = preset("tiny-llama")
    without = flops_per_token(plain, sequence, "causal") - 6 * matmul_parameters(plain)
    assert without == 12 * plain.layers * sequence / 2 * width
