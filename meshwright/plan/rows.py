"""Published measurements as jobs: what a row says becomes a job, a cluster and a program; what it does not is assumed.

Three formats are known by their headers: collected runs, collected memory figures, and layout sweeps (vTrain's).
"""

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.model.cost import flops_per_token
from meshwright.plan import software as programs
from meshwright.plan.software import Software

Fields = dict[str, str]


class Unpredicted(Exception):
    """A row that cannot be made a job, and why."""


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
    """Who counted: the allocator what it gave out, the allocator what it took, or the device."""
    memory_of_last_rank: bool
    """The measurement is the last pipeline rank's, not the fullest one's."""
    ran: bool | None
    """False where the source says it ran out of memory; None where there is no run."""
    group: str | None
    """Rows of one group are layouts of the same job."""
    assumed: tuple[str, ...]


_GPUS = (
    ("H100-96GB", "h100-96gb-500w"), ("H100-64GB", "h100-64gb"), ("H100", "h100"), ("H200", "h200"),
    ("A100-64GB", "a100-64gb"), ("A100-40GB", "a100-40gb"), ("A100", "a100-80gb"), ("A800", "a100-80gb"),
    ("V100", "v100-sxm-32gb"), ("GB300", "gb300"), ("GB200", "gb200"), ("B200", "b200"),
)  # fmt: skip


def read_rows(path: Path) -> tuple[str, list[Fields]]:
    """A file's format ("runs", "memory" or "sweep") and its rows; a sweep's get ids from their lines."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        header, rows = set(reader.fieldnames or ()), list(reader)
    if {"id", "tokens_per_s_per_gpu", "step_time_s"} <= header:
        return "runs", rows
    if {"id", "kind", "value", "unit", "basis"} <= header:
        return "memory", rows
    if {"iteration time (ms)", "hidden size", "tensor parallelism"} <= header:
        return "sweep", [{**row, "id": f"{path.stem}:{line}"} for line, row in enumerate(rows, start=2)]
    raise UserError(f"{path} has none of the known headers; give a table of runs, of memory figures or of layouts")


def case_of(kind: str, row: Fields) -> Case:
    """The row as a case; Unpredicted says what is missing."""
    make: Callable[[Fields], Case] = {"runs": _run, "memory": _memory_figure, "sweep": _sweep}[kind]
    return make(row)


def _sweep(row: Fields) -> Case:
    number = {name: int(value) for name, value in row.items() if name not in ("id", "iteration time (ms)") and "." not in value}
    gpus = number["# GPUs"]
    model = _gpt(number["# layers"], number["hidden size"], number["attention heads"], number["sequence length"], None)
    layout = {
        "dp_replicate": number["data parallelism"], "tp": number["tensor parallelism"], "sp": False,
        "pp": number["pipeline parallelism"], "split": None,
    }  # fmt: skip
    layout["split"] = _even(model["layers"], layout["pp"], 1)
    job = _job(
        model=model, layout=layout, memory={"recompute": "full"}, precision={"compute": "fp16"},
        batch={
            "sequence_length": number["sequence length"], "global_batch": number["global batch"],
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
    if row["ep"] or "MoE" in row["notes"]:
        raise Unpredicted("has experts, which are not modelled yet")
    model = _model(row, assumed)
    gpus = int(row["gpus"])
    cluster = _cluster(row, gpus, assumed)
    tp, pp, cp = (int(row[name] or 1) for name in ("tp", "pp", "cp"))
    if not row["tp"] or not row["pp"]:
        raise Unpredicted("does not say its layout")
    dp = int(row["dp"] or gpus // (tp * pp * cp))
    if dp * tp * pp * cp != gpus:
        raise Unpredicted(f"its layout takes {dp * tp * pp * cp} GPUs, not the {gpus} it names")
    sequence = int(row["seq_len"] or 0)
    if not sequence:
        raise Unpredicted("does not say its sequence length")
    software = _software(row, assumed)
    schedule, virtual = _schedule(row, pp, assumed)
    micro = int(row["micro_batch"] or 0)
    if not micro:
        micro = 1
        assumed.append("micro-batch 1")
    if "offload" in row["zero_stage_or_fsdp"]:
        raise Unpredicted("offloads optimizer and activations to the host by a way of its own")
    batch = int(row["global_batch_seqs"] or 0)
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
        **_data(row, dp, cp, cluster.gpus_per_node, pp), "tp": tp, "pp": pp, "cp": cp, "schedule": schedule,
        "virtual_stages": virtual, "sp": row["sp"] != "no" and tp > 1 and software.name != programs.MEGATRON.name,
        "split": _split(row, model["layers"], pp, 2 if schedule == "zb-v" else virtual or 1),
    }  # fmt: skip
    precision = {"compute": row["precision"] or "bf16"}
    job = _job(
        model=model, layout=layout, memory={"recompute": recompute}, precision=precision,
        batch={"sequence_length": sequence, "global_batch": batch, "micro_batch": micro},
    )  # fmt: skip
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
        step_s=None if died else _step_s(row, job, gpus),
        memory_bytes=float(row["peak_mem_gb"]) * 2**30 if row["peak_mem_gb"] else None,
        memory_kind="peak of a run",
        memory_counted=_counted(row["notes"]),
        memory_of_last_rank=False,
        ran=not died,
        group=f"{_source(row['id'])} {shape} on {place}",
        assumed=tuple(assumed),
    )


def _counted(notes: str) -> Literal["allocated", "reserved", "device"]:
    return "device" if "nvidia-smi" in notes else "allocated"


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
        raise Unpredicted("trains adapters, which are not modelled")
    filled = {name: "" for name in ("interconnect", "gpus_per_node", "compile", "step_time_s", "tokens_per_s_per_gpu")}
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


def _source(row_id: str) -> str:
    return row_id.rpartition("-")[0]


def _job(**sections: Any) -> Job:
    try:
        return Job.model_validate(sections)
    except ValidationError as error:
        raise Unpredicted(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None


def _gpt(layers: int, width: int, heads: int, sequence: int, vocabulary: int | None) -> dict[str, Any]:
    return {
        "layers": layers, "width": width, "heads": heads, "vocab_size": vocabulary or 51200, "norm": "layernorm",
        "activation": "gelu", "positions": "learned", "qkv_bias": True, "linear_bias": True, "tied": True,
        "max_sequence_length": sequence, "dropout": 0.1,
    }  # fmt: skip


def _model(row: Fields, assumed: list[str]) -> dict[str, Any]:
    name = row["model_name"]
    layers, width = (int(row[field]) if row[field] else None for field in ("layers", "d_model"))
    if layers is None or width is None:
        inferred = re.search(r"L=(\d+) d=(\d+)", row["notes"])
        if inferred is None:
            raise Unpredicted("does not say the model's shape")
        layers, width = map(int, inferred.groups())
        assumed.append(f"{layers} layers of width {width}, as its notes infer")
    heads = int(row["n_heads"] or 0)
    if not heads:
        heads = width // 128
        assumed.append("heads of 128")
    vocabulary = int(row["vocab"]) if row["vocab"] else None
    if vocabulary is None:
        assumed.append("vocabulary 51200")
    sequence = int(row["seq_len"] or 1)
    gated = re.search(r"llama|intern|qwen", name, re.IGNORECASE) is not None
    if not gated:
        model = _gpt(layers, width, heads, sequence, vocabulary)
        model["kv_heads"] = int(row["n_kv_heads"] or heads)
        model["ffn_width"] = int(row["d_ff"] or 4 * width)
        model["tied"] = "untied" not in row["notes"]
        if row["flash_attn"] not in ("no", ""):
            model["dropout"] = 0.0
        return model
    inner = int(row["d_ff"] or 0)
    if not inner:
        inner = -(-width * 8 // 3 // 256) * 256
        assumed.append(f"ffn width {inner}")
    return {
        "layers": layers, "width": width, "heads": heads, "kv_heads": int(row["n_kv_heads"] or heads), "ffn_width": inner,
        "vocab_size": vocabulary or 51200, "max_sequence_length": sequence,
        "tied": "tied" in row["notes"] and "untied" not in row["notes"] and width < 4096,
    }  # fmt: skip


def _cluster(row: Fields, gpus: int, assumed: list[str]) -> Cluster:
    key = next((key for name, key in _GPUS if row["gpu"].startswith(name)), None)
    if key is None:
        raise Unpredicted(f"its GPU {row['gpu']} is not in the hardware table")
    per_node = int(row["gpus_per_node"] or 0)
    if not per_node:
        per_node = {"a100-64gb": 4, "h100-64gb": 4, "gb200": 64, "gb300": 64}.get(key, 8)
        assumed.append(f"{per_node} GPUs a node")
    per_node = min(per_node, gpus)
    network = _network(row["interconnect"])
    links = {"network": network * per_node / min(8, per_node)} if network else None
    return Cluster(nodes=-(-gpus // per_node), gpus_per_node=per_node, gpu=key, links=links)


def _network(text: str) -> float | None:
    """GB/s of a node, from words such as `8x200 Gb/s` or `1600 Gbps`; None where they say nothing of it."""
    if found := re.search(r"(\d+)x\s?(\d+)\s?Gb", text):
        return int(found[1]) * int(found[2]) / 8
    if found := re.search(r"(\d+) Gb/s per GPU", text):
        return int(found[1])
    if found := re.search(r"(\d+) Gbps", text):
        return int(found[1]) / 8
    if found := re.search(r"(\d+)x Omni-Path", text):
        return int(found[1]) * 100 / 8
    return None


def _software(row: Fields, assumed: list[str]) -> Software:
    """The program a row's own columns describe; the era decides where they say nothing of attention."""
    sharded, attention, notes = row["zero_stage_or_fsdp"], row["flash_attn"], row["notes"]
    if _is_fsdp(sharded):
        if row["compile"] == "yes":
            return programs.FSDP_COMPILED
        return programs.FSDP_EAGER if attention in ("SDPA", "TE") else programs.FSDP
    if attention.startswith("TE"):
        if "overlap OFF" in notes:
            return replace(programs.MEGATRON_CORE, gradient_overlap=False, parameter_overlap=False, tensor_overlap=0.0)
        return programs.MEGATRON_CORE
    if attention == "yes":
        chunked = "Liger" in notes  # its loss never holds all logits
        return replace(programs.ZERO, logit_bytes=None, fusion="fused") if chunked else programs.ZERO
    if attention == "no":
        return programs.MEGATRON
    if row["gpu"].startswith(("A100", "V100")):
        assumed.append("attention with its scores written out, as was usual on this GPU")
        return programs.MEGATRON
    assumed.append("fused attention")
    return programs.MEGATRON_CORE if "overlap-grad-reduce" in notes else programs.PLAIN


def _is_fsdp(text: str) -> bool:
    return re.search(r"(?<!Megatron-)FSDP(?!=0)", text) is not None


def _data(row: Fields, dp: int, cp: int, per_node: int, pp: int) -> dict[str, Any]:
    """Data parallelism as the row's words on sharding put it."""
    text = row["zero_stage_or_fsdp"]
    if dp * cp == 1:
        return {"zero": 0}
    if "HYBRID" in text:
        shard = min(dp, per_node)
        return {"zero": 3, "dp_shard": shard, "dp_replicate": dp // shard}
    if found := re.search(r"zero1=(\d+)", text):
        shard = min(dp, int(found[1]))
        return {"zero": 1, "dp_shard": shard, "dp_replicate": dp // shard}
    if found := re.search(r"ZeRO-([123])", text):
        return {"zero": int(found[1]), "dp_shard": dp}
    if _is_fsdp(text) or "Megatron-FSDP" in text:
        return {"zero": 3 if pp == 1 else 2, "dp_shard": dp}
    if "istributed" in text or "param-gather" in row["notes"]:
        return {"zero": 1, "dp_shard": dp}
    return {"zero": 0, "dp_replicate": dp}


_SCHEDULES = {
    "": "1f1b", "1F1B": "1f1b", "interleaved-1F1B": "interleaved", "Interleaved1F1B": "interleaved",
    "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-V": "zb-v",
}  # fmt: skip


def _schedule(row: Fields, pp: int, assumed: list[str]) -> tuple[str, int | None]:
    if pp == 1:
        return "1f1b", None
    name = _SCHEDULES.get(row["pp_schedule"])
    if name == "1f1b" and "interleaved schedule" in row["notes"] and int(row["layers"]) % (2 * pp) == 0:
        assumed.append("two stages a rank")
        return "interleaved", 2
    if name is None:
        raise Unpredicted(f"its schedule {row['pp_schedule']} is not one of ours")
    virtual = int(row["virtual_stages"]) if row["virtual_stages"] else None
    if name == "interleaved":
        if "1 layer per chunk" in row["notes"]:
            virtual = (int(row["layers"]) + 2) // pp
        return (name, virtual or 2) if virtual != 1 else ("1f1b", None)
    return name, None


def _even(layers: int, pp: int, virtual: int) -> tuple[int, ...] | None:
    stages = pp * virtual
    return (layers // stages,) * stages if pp > 1 and layers % stages == 0 else None


def _split(row: Fields, layers: int, pp: int, virtual: int) -> tuple[int, ...] | None:
    """Equal stages, or ends with a layer fewer where that makes the others equal; None balances by cost."""
    equal = _even(layers, pp, virtual)
    if equal is not None and "first/last stage one layer fewer" not in row["notes"]:
        return equal
    if ends := _even(layers + 2, pp, virtual):
        return (ends[0] - 1, *ends[1:-1], ends[-1] - 1)
    if pp * virtual > layers:
        raise Unpredicted(f"its {pp * virtual} stages are more than its {layers} layers")
    return None


def _step_s(row: Fields, job: Job, gpus: int) -> float | None:
    """Seconds of a step as measured: printed, or from tokens per second, or from FLOP/s by the source's own count."""
    if row["step_time_s"]:
        return float(row["step_time_s"])
    if row["tokens_per_s_per_gpu"]:
        return job.tokens_per_step / (float(row["tokens_per_s_per_gpu"]) * gpus)
    if row["tflops_per_gpu"] or row["mfu_pct"]:
        rate = float(row["tflops_per_gpu"]) * 1e12 if row["tflops_per_gpu"] else float(row["mfu_pct"]) / 100 * 989.4e12
        return job.tokens_per_step * _counted_flops(row, job) / (rate * gpus)
    return None


def _counted_flops(row: Fields, job: Job) -> float:
    """FLOPs a token as the source counts them."""
    about = f"{row['source']} {row['notes']}"
    if re.search(r"HW FLOPs|HW TFLOPs|96B", about):
        model, sequence = job.model, job.batch.sequence_length
        blocks = 96 * model.layers * model.width**2
        return blocks * (1 + sequence / (6 * model.width) + model.vocab_size / (16 * model.layers * model.width))
    causal = re.search(r"causal|Megatron-Bridge|Automodel", about) and "non-causal" not in about
    return flops_per_token(job.model, job.batch.sequence_length, "causal" if causal else "full")
