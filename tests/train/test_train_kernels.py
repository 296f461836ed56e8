"""The attention kernel of a run: measured on a GPU, remembered, and nothing to choose elsewhere."""

from collections.abc import Iterator

import pytest
import torch

from meshwright.job import Job
from meshwright.model import attend
from meshwright.parallel import World
from meshwright.train import choose_attention


def make_job(compute: str = "bf16", **data: object) -> Job:
    return Job.model_validate(
        {
            "model": {"vocab_size": 64, "width": 256, "layers": 1, "heads": 8, "kv_heads": 2, "head_dim": 64},
            "data": {"sources": ["builtin:synthetic"], **data},
            "batch": {"sequence_length": 512, "global_batch": 2, "micro_batch": 2},
            "precision": {"compute": compute},
        }
    )


@pytest.fixture(autouse=True)
def torchs_own_settings() -> Iterator[None]:
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cuda.enable_flash_sdp(True)
    attend.EXPAND_GROUPS = False


def test_there_is_nothing_to_choose_on_a_cpu() -> None:
    assert choose_attention(make_job(), World(torch.device("cpu"))) is None


def test_what_was_chosen_before_is_taken_again_without_measuring() -> None:
    remembered = {"kernel": "flash", "groups": "expanded", "milliseconds": {}}
    world = World(torch.device("cuda"))  # no kernel runs: this works where there is no GPU
    assert choose_attention(make_job(), world, remembered) == remembered
    assert torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.cudnn_sdp_enabled()
    assert attend.EXPAND_GROUPS
    assert choose_attention(make_job("fp32"), world, remembered) is None
    assert choose_attention(make_job(mask_documents=True), world, remembered) is None


def test_expanded_groups_attend_as_native_ones() -> None:
    q, k, v = (torch.randn(2, heads, 5, 4, dtype=torch.float64) for heads in (6, 2, 2))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    wide = torch.nn.functional.scaled_dot_product_attention(q, *attend.expanded(k, v, 6), is_causal=True)
    torch.testing.assert_close(plain, wide)


@pytest.mark.gpu
def test_on_a_gpu_the_fastest_is_taken() -> None:
    chosen = choose_attention(make_job(), World(torch.device("cuda", 0)))
    assert chosen is not None and chosen["milliseconds"]
    name = f"{chosen['kernel']}, {chosen['groups']}"
    assert chosen["milliseconds"][name] == min(chosen["milliseconds"].values())
