"""Which layout a run takes on the machines of a Ray cluster, and how its ranks are split over them; no cluster runs."""

import sys
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.job import Job, load_job
from meshwright.launch.ray.layouts import gpu_of, splits
from meshwright.launch.ray.placement import room_of, split
from meshwright.layout import ranks_of

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from ray_cluster import JOB


def job(tmp_path: Path, *overrides: str) -> Job:
    (tmp_path / "job.toml").write_text(JOB)
    return load_job(str(tmp_path / "job.toml"), overrides).job


def shape(found: Any) -> tuple[int, int] | None:
    return None if found is None else (found.bundles, found.ranks_per_bundle)


def test_tensor_parallel_ranks_stay_on_one_machine(tmp_path: Path) -> None:
    four = job(tmp_path)
    assert shape(split(four, [4])) == (1, 4)
    assert shape(split(four, [3, 2, 1])) == (2, 2)
    assert split(four, [3, 1, 1, 1]) is None
    assert shape(split(job(tmp_path, "layout.tp=1", "layout.dp_shard=4", "batch.micro_batch=1"), [3, 1])) == (4, 1)
    assert split(four, [3, 2]).resources(gpus=True) == [{"CPU": 2.0, "GPU": 2.0}] * 2


@pytest.mark.thorough
def test_smaller_layouts_keep_the_batch(tmp_path: Path) -> None:
    eight = job(tmp_path, "layout.dp_shard=6", "batch.global_batch=12", "batch.micro_batch=1")

    def ranks(room: list[int], least: int = 1) -> list[int]:
        return [ranks_of(one.job.layout) for one in splits(eight, room, least) if "planned" not in one.why]

    assert ranks([12]) == [12, 8, 6, 4, 2]  # dp 5 does not divide the batch
    assert ranks([8, 2]) == [8, 6, 4, 2]
    assert ranks([8, 2], least=5) == [8, 6]
    assert {one.job.batch.global_batch for one in splits(eight, [12], 1)} == {12}


def chosen(job: Job, room: list[int], least: int = 1, gpu: str | None = None) -> Any:
    """The first choice as (dp, tp, cp, pp, bundles), and why."""
    found = next(splits(job, room, least, gpu), None)
    if found is None:
        return None
    layout = found.job.layout
    assert found.job.batch.global_batch == job.batch.global_batch and found.job.model == job.model
    return (found.job.data_parallel, layout.tp, layout.cp, layout.pp, found.bundles), found.why


def test_the_planner_chooses_where_the_degrees_do_not_fit(tmp_path: Path) -> None:
    four = job(tmp_path)
    assert chosen(four, [2, 1]) == ((1, 2, 1, 1, 1), "fewer data-parallel ranks")
    planned = "planned for {} machines, ranked as on h100, as its own degrees do not fit"
    assert chosen(four, [1, 1, 1, 1]) == ((4, 1, 1, 1, 4), planned.format("4 ranks on 4"))
    # Three ranks can share neither four sequences nor one layer.
    assert chosen(four, [1, 1, 1]) == ((2, 1, 1, 1, 2), planned.format("2 ranks on 2"))
    assert chosen(four, [1, 1, 1], least=3) is None
    assert chosen(job(tmp_path, "model.layers=3"), [1, 1, 1]) == ((1, 1, 1, 3, 3), planned.format("3 ranks on 3"))
    stages = job(tmp_path, "model.layers=4", "layout.dp_shard=1", "layout.tp=1", "layout.pp=4", "batch.micro_batch=1")
    assert chosen(stages, [2])[0] == (2, 1, 1, 1, 1) or chosen(stages, [2])[0] == (1, 1, 1, 2, 1)
    # All ranks or none: nothing is planned anew.
    assert chosen(four, [1, 1, 1, 1], least=4) is None


def test_layouts_that_do_not_fit_the_memory_are_left_out() -> None:
    sizes = {"layout.dp_shard": 8, "layout.zero": 3, "batch.global_batch": 8, "batch.micro_batch": 1}
    large = meshwright.load_job("llama-3.1-8b", set={**sizes, "batch.sequence_length": 1024})
    assert chosen(large, [4], gpu="h100")[0] == (4, 1, 1, 1, 1)
    assert chosen(large, [1], gpu="h100") is None  # 8B parameters with their masters and states take 128 GB
    assert chosen(large, [1])[1] == "fewer data-parallel ranks"  # nothing is known of the device


def test_what_ranks_run_on(tmp_path: Path) -> None:
    four, named = job(tmp_path), job(tmp_path, "cluster.gpu=a100-80gb")

    def nodes(*kinds: str) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"GPU": 8.0, f"accelerator_type:{kind}": 1.0}} for kind in kinds]

    assert gpu_of(four, nodes("H100", "H100"), gpus=True) == "h100"
    assert gpu_of(four, nodes("H100", "A100"), gpus=True) is None  # two kinds
    assert gpu_of(four, nodes("TPU-V4"), gpus=True) is None
    assert gpu_of(named, nodes("H100"), gpus=True) == "a100-80gb"


def test_room_of_machines() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}},
        {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
        {"Alive": True, "Resources": {"CPU": 16.0}},
    ]
    assert room_of(nodes, gpus=True) == [4, 0]
    assert room_of(nodes, gpus=False) == [16, 8]
