"""What a plan offers where nothing fits: each was searched for, has figures and fits."""

import re
from typing import Any

import pytest
from plan_jobs import asked

from meshwright.errors import UserError
from meshwright.job import Job, changed_job
from meshwright.plan import find_layouts, parse_cluster, question, search

LORA = {"model.adapter.rank": 16}
QLORA = LORA | {"model.adapter.base": "nf4"}


def refusal(cluster: str, preset: str, changes: dict[str, Any]) -> str:
    job = changed_job(Job(), {"model.preset": preset} | changes)
    with pytest.raises(UserError) as error:
        find_layouts(question(job, cluster, exact=False), 1, ())
    return str(error.value)


def planned(cluster: str, preset: str, changes: dict[str, Any]) -> str:
    """What a plan of the job as it was offered says of its fastest layout."""
    job = changed_job(Job(), {"model.preset": preset} | changes)
    best = find_layouts(question(job, cluster, exact=False), 1, ()).search.best[0].prediction
    return f"{best.fullest.device / 2**30:.1f} GiB and {best.tokens_per_s_per_gpu:,.0f} tokens/s per GPU"


def test_where_all_weights_do_not_fit_adapters_are_offered_as_they_are_planned() -> None:
    told = refusal("1xrtx-4090", "llama-3-8b", {})
    assert f"--set model.adapter.rank=16 (LoRA: {planned('1xrtx-4090', 'llama-3-8b', LORA)})" in told
    both = "--set model.adapter.rank=16 --set model.adapter.base=nf4"
    assert f"{both} (QLoRA: {planned('1xrtx-4090', 'llama-3-8b', QLORA)})" in told


def test_the_number_of_gpus_is_the_smallest_multiple_that_fits() -> None:
    told = refusal("1xrtx-4090", "llama-3-8b", {})
    [(cluster, times)] = re.findall(r"--cluster (\S+), (\d+) times the GPUs", told)
    assert cluster == f"1x{times}xrtx-4090"
    job = asked("llama-3-8b", 4096, 512)
    assert search(job, parse_cluster(cluster), top=1).best
    assert not search(job, parse_cluster(f"1x{int(times) // 2}xrtx-4090"), top=1).best


def test_only_what_fits_is_offered() -> None:
    told = refusal("1xh100", "llama-3-70b", {})
    assert "(QLoRA: " in told and "(LoRA: " not in told, "140 GB of frozen weights"
    of_adapters = refusal("1xh100", "llama-3-70b", LORA)
    assert "give --cluster" in of_adapters and "or --set model.adapter.base=nf4 (QLoRA: " in of_adapters
    assert "adapter" not in refusal("1xrtx-4090", "llama-3-70b", QLORA).partition("; give ")[2]


def test_mixtures_and_other_formats_are_offered_what_they_take() -> None:
    told = refusal("1xh100", "qwen3-30b-a3b", {})
    assert "(LoRA: " in told and "nf4" not in told, "its experts are no projections"
    assert "adapter" not in refusal("1xrtx-4090", "llama-3-8b", {"precision.compute": "fp8"})


def test_a_batch_that_somebody_gave_is_kept() -> None:
    """A batch of 512 sequences is accumulated: the same memory as 16, and another rate."""
    job = asked("llama-3-8b", 4096, 512)
    with pytest.raises(UserError) as error:
        find_layouts(question(job, "1xrtx-4090", exact=True), 1, ())
    own = asked("llama-3-8b", 4096, 512)
    adapted = changed_job(own, QLORA)
    best = find_layouts(question(adapted, "1xrtx-4090", exact=True), 1, ()).search.best[0].prediction
    assert f"and {best.tokens_per_s_per_gpu:,.0f} tokens/s per GPU)" in str(error.value).partition("(QLoRA: ")[2]
