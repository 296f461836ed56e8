"""The GPU table: every name finds its part, ambiguity and the unknown find nothing, rates are dense."""

import subprocess
import sys

import pytest

from meshwright.errors import UserError
from meshwright.hardware import find_gpu, gpu_by_key, known_gpus, peak_flops

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "memory_gib", "key"),
    [
        ("Tesla V100-SXM2-32GB", 31.7, "v100-sxm-32gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-SXM-64GB", 63.4, "a100-64gb"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80gb"),
        ("NVIDIA A100-SXM", 63.4, "a100-64gb"),
        ("NVIDIA A100 80GB PCIe", 79.3, "a100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA H100 NVL", 93.0, "h100-nvl"),
        ("NVIDIA H100", 63.1, "h100-64gb"),
        ("NVIDIA H100 64GB HBM2e", None, "h100-64gb"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA GH200 480GB", 94.5, "gh200-480gb"),
        ("NVIDIA GH200 120GB", 94.5, "gh200-120gb"),
        ("NVIDIA B200", 178.4, "b200"),
        ("NVIDIA GB200", 184.3, "gb200"),
        ("NVIDIA A40", 44.4, "a40"),
        ("NVIDIA A40", 47.5, "a40"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA GeForce RTX 3090", 23.6, "rtx-3090"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx-4090"),
        ("AMD Instinct MI250X", 63.98, "mi250x"),
        ("AMD Instinct MI300X", 191.98, "mi300x"),
    ],
)
def test_device_names_find_their_gpu(name: str, memory_gib: float | None, key: str) -> None:
    gpu = find_gpu(name, None if memory_gib is None else int(memory_gib * GIB))
    assert gpu is not None and gpu.key == key


@pytest.mark.parametrize(
    ("name", "memory_gib"),
    [
        ("NVIDIA H100", None),  # several parts print this
        ("NVIDIA H100", 93.0),
        ("NVIDIA A100-SXM", None),
        ("NVIDIA A100-SXM4-80GB", 39.4),  # name and size contradict
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 79.0),
        ("NVIDIA GeForce RTX 3090 Ti", 23.6),
        ("AMD Instinct MI250X/MI250", 63.98),
        ("Quadro P400", 2.0),
        ("", None),
    ],
)
def test_unknown_or_ambiguous_is_none(name: str, memory_gib: float | None) -> None:
    assert find_gpu(name, None if memory_gib is None else int(memory_gib * GIB)) is None


def test_every_listed_name_finds_its_own_entry() -> None:
    for gpu in known_gpus():
        for name in gpu.names:
            assert find_gpu(name.replace("*", ""), int(gpu.memory_gib * GIB)) == gpu


def test_peaks_are_dense_and_absent_where_unknown() -> None:
    assert peak_flops(gpu_by_key("h200"), "bf16") == 989.4e12
    assert peak_flops(gpu_by_key("a100-80gb"), "tf32") == 156e12
    assert peak_flops(gpu_by_key("mi250x"), "bf16") == 191.5e12  # one of the two dies, as torch counts
    assert peak_flops(gpu_by_key("v100-sxm-32gb"), "bf16") is None
    assert peak_flops(gpu_by_key("a100-80gb"), "fp8") is None
    assert peak_flops(gpu_by_key("h200"), "float64") is None


def test_rates_of_one_part_hang_together() -> None:
    for gpu in known_gpus():
        half = peak_flops(gpu, "fp16")
        assert half is not None and gpu.source
        assert peak_flops(gpu, "bf16") in (None, half)
        # Tensor units double their rate with each halving of the format: a sparse rate would stand out.
        for dtype, ratio in (("tf32", 0.5), ("fp8", 2.0)):
            rate = peak_flops(gpu, dtype)
            assert rate is None or rate == pytest.approx(ratio * half, rel=0.03), (gpu.key, dtype)


def test_key_that_is_not_there_names_near_ones() -> None:
    with pytest.raises(UserError, match=r"'h2000'.*h200"):
        gpu_by_key("h2000")


def test_room_imports_no_torch() -> None:
    code = "import sys, meshwright.hardware as h; h.known_gpus(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
