"""Published rows are read as they are worded: peaks, sharding, kernels, schedules and networks."""

import csv
from pathlib import Path

import pytest

from meshwright.plan import software as programs
from meshwright.plan import validate
from meshwright.plan.rows import case_of, read_rows

ROWS = Path(__file__).parents[2] / "benchmarks" / "evidence" / "published_runs.csv"


def row(name: str, **changed: str) -> dict[str, str]:
    """A published row with other words in some fields."""
    _, rows = read_rows(ROWS)
    return {**next(one for one in rows if one["id"] == name), **changed}


def test_an_mfu_is_a_share_of_its_own_gpu_s_peak(tmp_path: Path) -> None:
    """The same run told by its MFU and by its tokens: not every row is an H100's."""
    told = row("titan-034")
    by_tokens = case_of("runs", {**told, "mfu_pct": ""})
    by_mfu = case_of("runs", {**told, "tokens_per_s_per_gpu": ""})
    assert by_mfu.step_s == pytest.approx(by_tokens.step_s, rel=0.05)
    path = tmp_path / "one.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, told)
        writer.writeheader()
        writer.writerow({**told, "tokens_per_s_per_gpu": ""})
    assert validate([path]).summary()["overall"]["median_abs_time_error"] < 0.15


@pytest.mark.parametrize(
    ("words", "shard", "replicate"),
    [("HSDP", 8, 8), ("HSDP (shard 16)", 16, 4), ("FSDP1 HYBRID_SHARD (HSDP)", 8, 8), ("FSDP2", 64, 1)],
)
def test_hybrid_sharding(words: str, shard: int, replicate: int) -> None:
    case = case_of("runs", row("titan-034", zero_stage_or_fsdp=words))
    assert (case.job.layout.dp_shard, case.job.layout.dp_replicate) == (shard, replicate)
    assert case.software.name.startswith("FSDP")


@pytest.mark.parametrize(
    ("sharded", "attention", "program"),
    [
        ("FSDP2", "SDPA flash v2", programs.FSDP_EAGER),
        ("FSDP2", "flash-attn 2", programs.FSDP_FLASH),
        ("distributed optimizer", "cuDNN or own", programs.MEGATRON_CORE),
        ("ZeRO-3 (DeepSpeed)", "no", programs.DEEPSPEED_3),
    ],
)
def test_kernels_tell_the_program(sharded: str, attention: str, program: programs.Software) -> None:
    words = row("titan-034", zero_stage_or_fsdp=sharded, flash_attn=attention)
    assert case_of("runs", words).software == program


def test_a_variant_of_a_schedule_is_the_schedule() -> None:
    plain, variant = (
        case_of("runs", row("mbridge-013", pp_schedule=words)).job.layout
        for words in ("interleaved-1F1B", "interleaved-1F1B variant")
    )
    assert variant == plain and variant.schedule == "interleaved" and variant.virtual_stages == 5


@pytest.mark.parametrize(
    ("words", "network"),
    [
        ("NVLink; RDMA 400 Gb/s per GPU", 400.0),
        ("400 Gbps per GPU", 400.0),
        ("RoCE 1600 Gbps node-node", 200.0),
        ("3.2 Tb/s per node", 400.0),
        ("NVLink; 4x100Gb RoCE per node", 50.0),
        ("NVLink; 4x Omni-Path per node", 50.0),
        ("8x HDR IB", 200.0),
    ],
)
def test_networks_are_a_node_s(words: str, network: float) -> None:
    assert case_of("runs", row("titan-034", interconnect=words)).cluster.links == {"network": network}
    four = case_of("runs", row("titan-034", interconnect=words, gpus_per_node="4")).cluster.links
    assert four == {"network": network / 2 if "per GPU" in words else network}


def test_what_a_row_leaves_open_is_what_its_program_would_do() -> None:
    """Torchtitan cuts a batch into one micro-batch a pipeline rank; others are tuned before they are published."""
    assert case_of("runs", row("titan-013")).job.batch.micro_batch == 4
    tuned = case_of("runs", row("mlmh100-005"))
    assert tuned.job.batch.micro_batch > 1 and tuned.job.layout.schedule == "interleaved"
    assert {"micro-batch 4", "4 stages a rank"} <= set(tuned.assumed)
