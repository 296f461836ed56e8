"""Published rows are read as they are worded: peaks, sharding, kernels, schedules and networks."""

import csv
from pathlib import Path

import pytest

from meshwright.plan import predict, validate
from meshwright.plan import software as programs
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


def test_megatron_pads_its_vocabulary() -> None:
    """128 words on every tensor-parallel rank, as make-vocab-size-divisible-by has it; others keep theirs."""
    assert case_of("runs", row("bloom-030")).job.model.vocab_size == 250880
    assert case_of("runs", row("titan-013")).job.model.vocab_size == 128256


def test_bloom_s_programs() -> None:
    """DeepSpeed's pipeline, on 320 GPUs and more with blocking launches: every kernel's host time adds to the step."""
    large, small = (case_of("runs", row(name)) for name in ("bloom-030", "bloom-003"))
    assert large.software.blocking and not small.software.blocking
    assert small.software == programs.DEEPSPEED
    assert case_of("runs", row("mlm21-017")).software == programs.MEGATRON
    times = [predict(large.job, large.cluster, one).step_s for one in (large.software, programs.DEEPSPEED)]
    assert 1.01 * times[1] < times[0] < 1.1 * times[1]


def test_nanotron_balances_stages_by_cost() -> None:
    """Its head counts, so that the last stage has fewer layers."""
    case = case_of("runs", row("nanotron-015"))
    assert case.software == programs.NANOTRON and case.job.layout.split is None
    stages = [rank.terms["weights"] for rank in predict(case.job, case.cluster, case.software).memory]
    assert stages[0] > stages[-1]


@pytest.mark.parametrize(("source", "tp", "each"), [("_202506", "1", 4), ("_202412", "1", 12), ("_202412", "8", 16)])
def test_torchtitan_compiles_its_loss_since_2025(source: str, tp: str, each: float) -> None:
    words = row("titan-031", source=f"pytorch/torchtitan benchmarks/llama3{source}_x.md", tp=tp, dp=str(32 // int(tp)))
    assert case_of("runs", words).software.logit_bytes == each
