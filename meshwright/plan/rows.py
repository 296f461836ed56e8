"""Published measurements as jobs: what a row says becomes a job, a cluster and a program; what it does not is assumed.

Four formats are known by their headers: collected runs, collected memory figures, layout sweeps (vTrain's), and runs of
our own trainer.
"""

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from meshwright.errors import UserError
from meshwright.job import Job, load_job
from meshwright.job.devices import Cluster
from meshwright.plan import software as programs
from meshwright.plan.machine import parse_cluster
from meshwright.plan.mixtures import expert_parallel, format_of, mixture_of
from meshwright.plan.predict import own_software, predict
from meshwright.plan.software import Software
from meshwright.plan.wording import (
    Fields,
    Unpredicted,
    cluster_of,
    counted_by,
    data_layout,
    equal_split,
    gpt_shape,
    measured_step_s,
    model_of,
    padded_vocabulary,
    schedule_of,
    software_of,
    split_of,
)


@dataclass(frozen=True)
class Case:
    """A row as something to predict."""

    id: str
    source: str
    job: Job
    cluster: Cluster
    software: Software
    step_s: float | None
    memory_bytes: float | None
    memory_kind: str
    memory_counted: Literal["allocated", "reserved", "device"]
    """What was counted: memory allocated, memory reserved by the allocator, or memory used on the device."""
    memory_of_last_rank: bool
    """The measurement is the last pipeline rank's, not the fullest one's."""
    ran: bool | None
    """False where the source says it ran out of memory; None where there is no run."""
    group: str | None
    """Rows of one group are layouts of the same job."""
    assumed: tuple[str, ...]
    use: str = ""
    """"fitted" where a guessed rate was chosen to meet this row, "held out" where it was not, "own" for runs of our own
    trainer; empty for other programs on GPUs whose rates are no guess."""


def read_rows(path: Path) -> tuple[str, list[Fields]]:
    """A file's format ("runs", "memory", "sweep" or "own") and its rows; a sweep's get ids from their lines."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        header, rows = set(reader.fieldnames or ()), list(reader)
    if {"id", "tokens_per_s_per_gpu", "step_time_s"} <= header:
        return "runs", rows
    if {"id", "kind", "value", "unit", "basis"} <= header:
        return "memory", rows
    if {"iteration time (ms)", "hidden size", "tensor parallelism"} <= header:
        return "sweep", [{**row, "id": f"{path.stem}:{line}"} for line, row in enumerate(rows, start=2)]
    if {"id", "job", "overrides", "cluster", "step_s", "allocated_bytes", "device_bytes"} <= header:
        return "own", rows
    raise UserError(f"{path} has none of the known headers; give a table of runs, of memory figures or of layouts")


def case_of(kind: str, row: Fields) -> Case:
    """The row as a case; Unpredicted says what is missing."""
    make: Callable[[Fields], Case] = {"runs": _run, "memory": _memory_figure, "sweep": _sweep, "own": _own}[kind]
    try:
        return make(row)
    except ValueError as error:
        raise Unpredicted(f"has a field that cannot be read ({error})") from None


def _sweep(row: Fields) -> Case:
    number = {
        name: int(value)
        for name, value in row.items()
        if name not in ("id", "iteration time (ms)") and "." not in value
    }
    gpus = number["# GPUs"]
    sequence = number["sequence length"]
    model = gpt_shape(number["# layers"], number["hidden size"], number["attention heads"], sequence, None)
    pp = number["pipeline parallelism"]
    layout = {
        "dp_replicate": number["data parallelism"], "tp": number["tensor parallelism"], "sp": False, "pp": pp,
        "split": equal_split(model["layers"], pp, 1),
    }  # fmt: skip
    job = _job(
        model=model, layout=layout, memory={"recompute": "full"}, precision={"compute": "fp16"},
        batch={
            "sequence_length": sequence, "global_batch": number["global batch"],
            "micro_batch": number["micro batch"],
        },
    )  # fmt: skip
    cluster = Cluster(nodes=-(-gpus // 8), gpus_per_node=min(gpus, 8), gpu="a100-80gb", links={"network": 100.0})
    group = "/".join(row[name] for name in ("# GPUs", "global batch", "hidden size", "# layers", "sequence length"))
    source = row["id"].rpartition(":")[0]
    return Case(
        row["id"], source, job, cluster, programs.MEGATRON, float(row["iteration time (ms)"]) / 1e3, None, "",
        "allocated", False, True, f"{source} {group}", ("vocabulary 51200",),
    )  # fmt: skip


def _run(row: Fields) -> Case:
    assumed: list[str] = []
    if (row["ep"] or "MoE" in row["notes"]) and not row.get("n_experts"):
        raise Unpredicted("has experts, but does not say how many or how large")
    model = model_of(row, assumed) | mixture_of(row)
    gpus = int(row["gpus"])
    cluster = cluster_of(row, gpus, assumed)
    tp, pp, cp = (int(row[name] or 1) for name in ("tp", "pp", "cp"))
    if not row["tp"] or not row["pp"]:
        raise Unpredicted("does not say its layout")
    dp = int(row["dp"] or gpus // (tp * pp * cp))
    if dp * tp * pp * cp != gpus:
        raise Unpredicted(f"its layout needs {dp * tp * pp * cp} GPUs, not the {gpus} it names")
    sequence = int(row["seq_len"] or 0)
    if not sequence:
        raise Unpredicted("does not say its sequence length")
    software = software_of(row, assumed)
    if software.pads_vocabulary:
        model["vocab_size"] = padded_vocabulary(model["vocab_size"], tp)
    schedule, virtual = schedule_of(row, pp, assumed)
    micro, batch = int(row["micro_batch"] or 0), int(row["global_batch_seqs"] or 0)
    tuned = not micro
    if not micro:
        micro = 1
        if software.selective == "half" and pp > 1 and batch >= dp * pp:
            micro, tuned = batch // (dp * pp), False  # torchtitan's default is one micro-batch a pipeline rank
    if "offload" in row["zero_stage_or_fsdp"]:
        raise Unpredicted("offloads optimizer and activations to the host in its own way")
    if not batch:
        batch = micro * dp * (max(1, 8 * pp) if pp > 1 else 4)
        assumed.append(f"global batch {batch}")
    if batch % (micro * dp):
        batch = max(1, round(batch / (micro * dp))) * micro * dp
        assumed.append(f"global batch {batch}, the nearest that divides")
    recompute = row["recompute"]
    if not recompute:
        recompute = "none"
        assumed.append("no recomputation")
    layout = {
        **data_layout(row, dp, cp, cluster.gpus_per_node, software, assumed),
        "tp": tp, "pp": pp, "cp": cp, "ep": expert_parallel(row), "schedule": schedule, "virtual_stages": virtual,
        "sp": tp > 1 and (row["sp"] == "yes" or (not row["sp"] and software.attention == "flash")),
        "split": None,
    }  # fmt: skip
    if not software.split_by_cost:
        layout["split"] = split_of(row, model["layers"], pp, 2 if schedule == "zb-v" else virtual or 1)
    precision = {"compute": format_of(row, assumed)}
    job = _job(
        model=model, layout=layout, memory={"recompute": recompute}, precision=precision,
        batch={"sequence_length": sequence, "global_batch": batch, "micro_batch": micro},
    )  # fmt: skip
    if tuned:
        open_schedule = software.messages == "buckets" and not row["pp_schedule"] and not row["virtual_stages"]
        job = _tuned(job, cluster, software, stages=(1, 2, 4) if open_schedule and pp > 1 else ())
    if not row["recompute"] and model.get("experts") and not software.stashes:
        software = replace(software, selective="cheap")
        job = _recomputing(job, cluster, software, assumed)
    if not row["micro_batch"]:
        assumed.append(f"micro-batch {job.batch.micro_batch}")
    if job.layout.virtual_stages != virtual:
        assumed.append(f"{job.layout.virtual_stages} stages a rank")
    if row["peak_mem_gb"] and "GiB" not in row["notes"]:
        assumed.append("GB as programs print it, 2³⁰ bytes")
    died = "oom" in (row["tokens_per_s_per_gpu"] + row["step_time_s"]).lower()
    shape = "/".join(row[name] for name in ("model_name", "layers", "d_model", "n_heads", "seq_len"))
    place = "/".join(row[name] for name in ("gpu", "gpus", "global_batch_seqs", "precision"))
    return Case(
        id=row["id"],
        source=_source(row["id"]),
        job=job,
        cluster=cluster,
        software=software,
        step_s=None if died else measured_step_s(row, job, gpus),
        memory_bytes=float(row["peak_mem_gb"]) * 2**30 if row["peak_mem_gb"] else None,
        memory_kind="peak of a run",
        memory_counted=counted_by(row),
        memory_of_last_rank=False,
        ran=not died,
        group=f"{_source(row['id'])} {shape} on {place}",
        assumed=tuple(assumed),
        use=row.get("use", ""),
    )


def _tuned(job: Job, cluster: Cluster, software: Software, stages: tuple[int, ...]) -> Job:
    """The job with the micro-batch, and of the numbers of `stages` a rank the one, that are predicted fastest of those
    that fit, as runs are tuned before they are published; unchanged where none fits."""
    found: list[tuple[float, Job]] = []
    for size in (1, 2, 4, 8):
        for virtual in stages or (None,):
            layout: dict[str, Any] = {}
            if virtual is not None:
                split = equal_split(job.model.layers, job.layout.pp, virtual)
                schedule = "interleaved" if virtual > 1 else "1f1b"
                layout = {"virtual_stages": virtual if virtual > 1 else None, "schedule": schedule, "split": split}
            sections = job.model_dump(mode="json", exclude_unset=True)
            sections["batch"] |= {"micro_batch": size}
            sections["layout"] |= layout
            try:
                one = _job(**sections)
                prediction = predict(one, cluster, software, every_rank=False)
            except (Unpredicted, UserError):
                continue  # sizes that do not divide
            if prediction.fits:
                found.append((prediction.step_s, one))
    return min(found, key=lambda pair: pair[0], default=(0.0, job))[1]


def _recomputing(job: Job, cluster: Cluster, software: Software, assumed: list[str]) -> Job:
    """The job with as little recomputation as it needs to fit, first of what takes few FLOPs: tables of mixtures do not
    say what is recomputed; unchanged where nothing fits."""
    ways: tuple[Any, ...] = ("none", "selective", {"every": 8}, {"every": 4}, {"every": 2}, "full")
    for way in ways:
        one = _job(**(job.model_dump(mode="json", exclude_unset=True) | {"memory": {"recompute": way}}))
        if predict(one, cluster, software).fits:
            if way != "none":
                named = way if isinstance(way, str) else f"of one of {way['every']} layers"
                assumed[:] = [*(said for said in assumed if said != "no recomputation"), f"recomputation {named}"]
            return one
    return job


_CASE_NAME = re.compile(
    r"llama3_(70b|405b)(?=.*_l(\d+))(?=.*_tp(\d+))(?=.*_pp(\d+))(?=.*_dp(\d+))(?=.*_mbc(\d+))(?:.*_cp(\d+))?(?:.*_seq(\d+))?"
)
_CASE_SHAPES = {
    "70b": {"d_model": "8192", "d_ff": "28672", "n_heads": "64", "n_kv_heads": "8"},
    "405b": {"d_model": "16384", "d_ff": "53248", "n_heads": "128", "n_kv_heads": "16"},
}


def _memory_figure(row: Fields) -> Case:
    """A measured memory figure, read as a run that says nothing of time."""
    if row["basis"] != "measured":
        raise Unpredicted(f"its basis is {row['basis']}, not a measurement")
    if row["kind"] == "max_model_size":
        raise Unpredicted("gives the size of the largest model that fits, not its shape or its memory")
    if "LoRA" in row["model_name"]:
        raise Unpredicted("trains adapters, and does not say of which rank or projections")
    filled = dict.fromkeys(("interconnect", "gpus_per_node", "compile", "step_time_s", "tokens_per_s_per_gpu"), "")
    filled |= {"tflops_per_gpu": "", "mfu_pct": "", "peak_mem_gb": "", **row}
    filled["flash_attn"] = "TE" if re.search(r"Megatron|SimuMax", row["source"]) else "yes"
    if found := _CASE_NAME.match(row["model_name"]):
        size, layers, tp, pp, dp, count, cp, sequence = found.groups()
        filled |= _CASE_SHAPES[size]
        filled |= {"layers": layers, "tp": tp, "pp": pp, "dp": dp, "cp": cp or "1", "seq_len": sequence or "4096"}
        filled |= {"vocab": "128256", "global_batch_seqs": str(int(dp) * int(count)), "pp_schedule": ""}
    elif not row["vocab"]:
        raise Unpredicted("does not say the model's vocabulary or shape")
    if not filled["gpus"]:
        raise Unpredicted("does not say how many GPUs there were")
    unit = {"bytes": 1.0, "GiB": 2.0**30, "GB": 2.0**30}.get(row["unit"])
    if unit is None:
        raise Unpredicted(f"its unit {row['unit']} is not one of memory")
    return replace(
        _run(filled),
        step_s=None,
        memory_bytes=float(row["value"]) * unit,
        memory_kind=row["kind"],
        memory_counted="reserved" if row["kind"] in ("peak", "peak_reserved") else "allocated",
        memory_of_last_rank="logging rank" in row["notes"],
        ran=None,
        group=None,
    )


def _own(row: Fields) -> Case:
    """A run of our own trainer: a job with overrides on a cluster, which a profile may be of."""
    job = load_job(row["job"], row["overrides"].split()).job
    device, software = row["device_bytes"], own_software(job)
    if row.get("blocks_keep") == "swiglu":
        software = replace(software, lean_blocks=False)
    return Case(
        id=row["id"],
        source=_source(row["id"]),
        job=job,
        cluster=parse_cluster(row["cluster"]),
        software=software,
        step_s=float(row["step_s"]),
        memory_bytes=float(device or row["allocated_bytes"]),
        memory_kind="peak of a run",
        memory_counted="device" if device else "allocated",
        memory_of_last_rank=False,
        ran=True,
        group=None,
        assumed=(),
        use="own",
    )


def _source(row_id: str) -> str:
    return row_id.rpartition("-")[0]


def _job(**sections: Any) -> Job:
    try:
        return Job.model_validate(sections)
    except ValidationError as error:
        raise Unpredicted(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None
