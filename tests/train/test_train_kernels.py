"""The attention kernel of a run: measured on a GPU, remembered, and nothing to choose elsewhere."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

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
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


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


@pytest.fixture
def flash_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with the names torch looks for; none of its functions is called without a GPU."""
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (folder / "interface.py").write_text("_flash_attn_fwd = _flash_attn_bwd = None")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]


FLASH_4 = {"kernel": "flash-4", "groups": "native", "milliseconds": {}}


@pytest.mark.usefixtures("flash_4")
def test_flash_attention_4_takes_the_place_of_torchs_kernel_until_the_next_job() -> None:
    world = World(torch.device("cuda"))
    assert choose_attention(make_job(), world, FLASH_4) == FLASH_4
    assert current_flash_attention_impl() == "FA4"
    assert torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.cudnn_sdp_enabled()
    choose_attention(make_job(), world, {"kernel": "flash", "groups": "native", "milliseconds": {}})
    assert current_flash_attention_impl() is None


def test_a_kernel_that_is_no_longer_installed_is_chosen_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"kernel": "cudnn", "groups": "native", "milliseconds": {"cudnn, native": 1.0}}
    monkeypatch.setattr("meshwright.train.kernels._measured", lambda *_: found)
    assert choose_attention(make_job(), World(torch.device("cuda")), FLASH_4) == found


@pytest.mark.usefixtures("flash_4")
@pytest.mark.parametrize("section, change", [("model", {}), ("model", {"sliding_window": 64}), ("layout", {"cp": 2})])
def test_flash_attention_4_is_tried_for_plain_causal_attention_only(
    section: str, change: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    job = make_job()
    job = job.model_copy(update={section: getattr(job, section).model_copy(update=change)})

    def took(kernel: str, *given: object) -> float:
        tried.append(kernel)
        return 1.0

    monkeypatch.setattr("meshwright.train.kernels._time", took)
    monkeypatch.setattr("meshwright.train.kernels._drawn", lambda *sizes: [torch.zeros(1)] * 4)
    choose_attention(job, World(torch.device("cuda")))
    assert ("flash-4" in tried) == (not change)


@pytest.mark.usefixtures("flash_4")
@pytest.mark.parametrize("wrong, kernel", [(1e-3, "flash-4"), (0.1, "cudnn")])
def test_a_kernel_with_other_gradients_is_refused_however_fast(
    wrong: float, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = [torch.randn(4, 4) for _ in range(4)]

    def took(kernel: str, inputs: list[torch.Tensor], *how: bool) -> float:
        for tensor in inputs[:3]:
            tensor.grad = tensor * (1 + wrong if kernel == "flash-4" else 1)
        return 1.0 if kernel == "flash-4" else 2.0

    monkeypatch.setattr("meshwright.train.kernels._time", took)
    monkeypatch.setattr("meshwright.train.kernels._drawn", lambda *sizes: drawn)
    chosen = choose_attention(make_job(), World(torch.device("cuda")))
    assert chosen is not None and chosen["kernel"] == kernel
    said = "its gradients are 10.0% apart from torch's"
    expected = {} if kernel == "flash-4" else {"flash-4, native": said, "flash-4, expanded": said}
    assert chosen.get("refused", {}) == expected


@pytest.mark.parametrize("captured", [False, True])
def test_launching_is_part_of_the_time_unless_it_is_captured(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job, asked = make_job(), []
    job = job.model_copy(update={"run": job.run.model_copy(update={"cuda_graph": captured})})
    monkeypatch.setattr("meshwright.train.kernels._time", lambda *given: asked.append(given[-1]))
    monkeypatch.setattr("meshwright.train.kernels._drawn", lambda *sizes: [torch.zeros(1)] * 4)
    choose_attention(job, World(torch.device("cuda")))
    assert set(asked) == {captured}


def test_expanded_groups_attend_as_native_ones() -> None:
    q, k, v = (torch.randn(2, heads, 5, 4, dtype=torch.float64) for heads in (6, 2, 2))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    wide = torch.nn.functional.scaled_dot_product_attention(q, *attend.expanded(k, v, 6), is_causal=True)
    torch.testing.assert_close(plain, wide)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_on_a_gpu_the_fastest_is_taken(captured: bool) -> None:
    job = make_job()
    job = job.model_copy(update={"run": job.run.model_copy(update={"cuda_graph": captured})})
    chosen = choose_attention(job, World(torch.device("cuda", 0)))
    assert chosen is not None and chosen["milliseconds"]
    name = f"{chosen['kernel']}, {chosen['groups']}"
    assert chosen["milliseconds"][name] == min(chosen["milliseconds"].values())
