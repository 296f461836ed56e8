"""Interprets the wording of rows: shapes, machines, programs, sharding, schedules, and FLOPs by the source's count."""

import re
from dataclasses import replace
from typing import Any, Literal

from meshwright.cost import flops_per_token
from meshwright.hardware import gpu_by_key, peak_flops
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.plan import software as programs
from meshwright.plan.software import Software

Fields = dict[str, str]


class Unpredicted(Exception):
    """A row that cannot be turned into a job, and why."""


_GPUS = (
    ("H100-96GB", "h100-96gb-500w"), ("H100-64GB", "h100-64gb"), ("H100", "h100"), ("H200", "h200"),
    ("A100-64GB", "a100-64gb"), ("A100-40GB", "a100-40gb"), ("A100", "a100-80gb"), ("A800", "a100-80gb"),
    ("V100", "v100-sxm-32gb"), ("GB300", "gb300"), ("GB200", "gb200"), ("B300", "b300"), ("B200", "b200"),
    ("MI250X", "mi250x"), ("MI300X", "mi300x"), ("MI325X", "mi325x"),
)  # fmt: skip
_SCHEDULES = {
    "": "1f1b", "1F1B": "1f1b", "interleaved-1F1B": "interleaved", "Interleaved1F1B": "interleaved",
    "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-V": "zb-v",
}  # fmt: skip


def gpt_shape(layers: int, width: int, heads: int, sequence: int, vocabulary: int | None) -> dict[str, Any]:
    """A GPT of its time: learned positions, LayerNorm, GELU, biases, dropout, one table at both ends."""
    return {
        "layers": layers, "width": width, "heads": heads, "vocab_size": vocabulary or 51200, "norm": "layernorm",
        "activation": "gelu", "positions": "learned", "qkv_bias": True, "linear_bias": True, "tied": True,
        "max_sequence_length": sequence, "dropout": 0.1,
    }  # fmt: skip


def model_of(row: Fields, assumed: list[str]) -> dict[str, Any]:
    """The model's shape; Llama's choices where its name says so, else a GPT's."""
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
        model = gpt_shape(layers, width, heads, sequence, vocabulary)
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
        "layers": layers, "width": width, "heads": heads, "kv_heads": int(row["n_kv_heads"] or heads),
        "ffn_width": inner, "vocab_size": vocabulary or 51200, "max_sequence_length": sequence,
        "tied": "tied" in row["notes"] and "untied" not in row["notes"] and width < 4096,
    }  # fmt: skip


def _gpu_key(row: Fields) -> str:
    key = next((key for name, key in _GPUS if row["gpu"].startswith(name)), None)
    if key is None:
        raise Unpredicted(f"its GPU {row['gpu']} is not in the hardware table")
    return key


def cluster_of(row: Fields, gpus: int, assumed: list[str]) -> Cluster:
    """The machine, with its network where the row gives it."""
    key = _gpu_key(row)
    per_node = int(row["gpus_per_node"] or 0)
    if "NVL72" in row["interconnect"]:
        per_node = 64  # as many as are used of a rack's 72, all behind one switch
    if not per_node:
        per_node = {"a100-64gb": 4, "h100-64gb": 4, "gb200": 64, "gb300": 64}.get(key, 8)
        assumed.append(f"{per_node} GPUs a node")
    whole, per_node = per_node, min(per_node, gpus)  # a part of one machine has its part of the machine's cards
    network = _network(row["interconnect"], whole)
    links = {"network": network * per_node / whole} if network else None
    return Cluster(nodes=-(-gpus // per_node), gpus_per_node=per_node, gpu=key, links=links)


_CARDS = {"EDR": 100, "Omni-Path": 100, "HDR": 200, "Slingshot": 200, "NDR": 400, "CX-7": 400, "XDR": 800}
"""Gb/s of one card by its name."""


def _network(text: str, per_node: int) -> float | None:
    """GB/s of a node of so many GPUs, from words such as `8x200 Gb/s`, `400 Gbps per GPU`, `1600 Gbps` or `8x HDR`;
    None where it is not given."""
    if found := re.search(r"(\d+)\s?x\s?(\d+)\s?Gb", text):
        return int(found[1]) * int(found[2]) / 8
    if found := re.search(r"([\d.]+)\s?(T|G)b(?:ps|/s|it/s)(?: \w+)? (?:per|a|each) (GPU|node)?", text):
        each = float(found[1]) * (1000 if found[2] == "T" else 1) / 8
        return each * per_node if found[3] == "GPU" else each
    if found := re.search(r"([\d.]+)\s?(T|G)b(?:ps|/s|it/s)", text):
        return float(found[1]) * (1000 if found[2] == "T" else 1) / 8
    if found := re.search(rf"(\d+)\s?x\s?({'|'.join(_CARDS)})", text):
        return int(found[1]) * _CARDS[found[2]] / 8
    return None


def software_of(row: Fields, assumed: list[str]) -> Software:
    """The program a row's own columns describe; the era decides where they do not mention attention."""
    sharded, attention, notes = row["zero_stage_or_fsdp"], row["flash_attn"], row["notes"]
    own_kernels = re.search(r"\bTE\b|cuDNN", attention) is not None
    own_kernels = own_kernels or re.search("kernels TE|Megatron-Bridge", f"{notes} {row['source']}") is not None
    if _is_fsdp(sharded) and not (own_kernels and int(row["tp"] or 1) * int(row["pp"] or 1) > 1):
        if row["compile"] == "yes":
            overlap = re.search(r"async\s?TP", notes, re.I) is not None
            return replace(programs.FSDP_COMPILED, tensor_overlap=overlap, logit_bytes=_logit_bytes(row))
        if own_kernels:
            once = "EP" in row.get("dispatcher", "")
            return replace(programs.FSDP_EAGER, fp8_scales="delayed", sends_once=once)
        if "SDPA" in attention:
            return replace(programs.FSDP_EAGER, logit_bytes=_logit_bytes(row))
        return programs.FSDP_FLASH if attention not in ("", "no") else programs.FSDP
    if own_kernels:
        if "overlap OFF" in notes:
            return replace(
                programs.MEGATRON_CORE, gradient_overlap=False, parameter_overlap=False, tensor_overlap=False
            )
        core = _megatron_core(row)
        # NeMo's and Megatron-Bridge's recipes for fp8 sum and reduce gradients in 16 bits: grad_reduce_in_fp32 = False
        return replace(core, reduced_bytes=2) if "fp8" in row["precision"] else core
    if attention not in ("", "no"):
        chunked = "Liger" in notes  # its loss never holds all logits
        return replace(programs.ZERO, logit_bytes=None, fusion="fused") if chunked else programs.ZERO
    if attention == "no":
        if "ZeRO-3" in sharded:
            return programs.DEEPSPEED_3
        if not re.search("DeepSpeed|BF16Optimizer|tr11-176B", f"{sharded} {row['source']} {notes}"):
            return programs.MEGATRON
        # BLOOM's chronicles: without it, jobs of 320 GPUs and more always hung.
        blocking = "tr11-176B" in row["source"] and int(row["gpus"]) >= 320
        return replace(programs.DEEPSPEED, blocking=blocking)
    if row["gpu"].startswith(("A100", "V100")):
        assumed.append("attention with its scores written out, as was usual on this GPU")
        return programs.MEGATRON
    assumed.append("fused attention")
    if "nanotron" in row["source"]:
        return programs.NANOTRON
    return programs.MEGATRON_CORE if "overlap-grad-reduce" in notes else programs.PLAIN


def _megatron_core(row: Fields) -> Software:
    """Megatron core of the container that a row names, on its GPU."""
    container = re.search(r"\[(\d\d\.\d\d)[\d.]* container\]", row["source"])
    if container is not None and container[1] >= "26.06" and "B" in row["gpu"].split("-")[0]:
        return programs.MEGATRON_GRAPHS
    # Its recipes overlap transfers of rows where another micro-batch is there to compute, on slower networks.
    interleaved = int(row["virtual_stages"] or 1) > 1 and "NVL72" not in row["interconnect"]
    overlap = interleaved or re.search(r"EP overlap on|recipe: overlap", row["notes"]) is not None
    in_transit = "fused permute" in row["notes"]
    return replace(programs.MEGATRON_CORE, expert_overlap=overlap, sorts_in_transit=in_transit)


def padded_vocabulary(words: int, tp: int) -> int:
    """Megatron's table of words: a multiple of 128 on every tensor-parallel rank (make-vocab-size-divisible-by)."""
    return -(-words // (128 * tp)) * 128 * tp


def _logit_bytes(row: Fields) -> float:
    """What torch's loss holds for each logit: torchtitan has compiled it since 2025, and reads and writes 16 bits;
    before, three copies in 32 bits, or four where the vocabulary is sharded."""
    if row["compile"] == "yes" and re.search(r"torchtitan.*_20(2[5-9]|[3-9]\d)\d\d", row["source"]):
        return 4.0
    return 16.0 if int(row["tp"] or 1) > 1 else 12.0


def _is_fsdp(text: str) -> bool:
    return re.search(r"(?<!Megatron-)FSDP(?!=0)|HSDP", text) is not None


def data_layout(row: Fields, dp: int, cp: int, per_node: int, software: Software, assumed: list[str]) -> dict[str, Any]:
    """Data parallelism as the row describes its sharding."""
    text, pp = row["zero_stage_or_fsdp"], int(row["pp"] or 1)
    if dp * cp == 1:
        return {"zero": 0}
    if "HYBRID" in text or "HSDP" in text:
        named = re.search(r"shard(?:s|ed)?(?: degree| over)? (\d+)", text)
        shard = min(dp, int(named[1]) if named else per_node)
        return {"zero": 3 if pp == 1 else 2, "dp_shard": shard, "dp_replicate": dp // shard}
    if found := re.search(r"zero1=(\d+)", text):
        shard = min(dp, int(found[1]))
        return {"zero": 1, "dp_shard": shard, "dp_replicate": dp // shard}
    if found := re.search(r"ZeRO-([123])", text):
        return {"zero": int(found[1]), "dp_shard": dp}
    if _is_fsdp(text) or "Megatron-FSDP" in text:
        return {"zero": 3 if pp == 1 else 2, "dp_shard": dp}
    if "istributed" in text or "param-gather" in row["notes"]:
        return {"zero": 1, "dp_shard": dp}
    if not text and software.messages == "buckets":
        assumed.append("states sharded, as this program's recipes do")
        return {"zero": 1, "dp_shard": dp}
    return {"zero": 0, "dp_replicate": dp}


def schedule_of(row: Fields, pp: int, assumed: list[str]) -> tuple[str, int | None]:
    """Schedule and stages a rank."""
    if pp == 1:
        return "1f1b", None
    said = row["pp_schedule"]
    # "interleaved-1F1B variant" and the like: a schedule with a word about it
    name = next((ours for word, ours in _SCHEDULES.items() if said.lower() == word.lower()), None)
    if name is None and (words := re.split(r"[\s(,]", said)):
        name = next((ours for word, ours in _SCHEDULES.items() if word and words[0].lower() == word.lower()), None)
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


def equal_split(layers: int, pp: int, virtual: int) -> tuple[int, ...] | None:
    """Equally many layers in every stage, where possible."""
    stages = pp * virtual
    return (layers // stages,) * stages if pp > 1 and layers % stages == 0 else None


def split_of(row: Fields, layers: int, pp: int, virtual: int) -> tuple[int, ...] | None:
    """Equal stages, or ends with a layer fewer where that makes the others equal; None balances by cost."""
    equal = equal_split(layers, pp, virtual)
    if equal is not None and "first/last stage one layer fewer" not in row["notes"]:
        return equal
    if ends := equal_split(layers + 2, pp, virtual):
        return (ends[0] - 1, *ends[1:-1], ends[-1] - 1)
    if pp * virtual > layers:
        raise Unpredicted(f"its {pp * virtual} stages are more than its {layers} layers")
    return None


def measured_step_s(row: Fields, job: Job, gpus: int) -> float | None:
    """Seconds of a step as measured: printed, or from tokens per second, or from FLOP/s by the source's own count."""
    if row["step_time_s"]:
        return float(row["step_time_s"])
    if row["tokens_per_s_per_gpu"]:
        return job.tokens_per_step / (float(row["tokens_per_s_per_gpu"]) * gpus)
    if row["tflops_per_gpu"] or row["mfu_pct"]:
        if row["tflops_per_gpu"]:
            rate = float(row["tflops_per_gpu"]) * 1e12
        else:
            rate = float(row["mfu_pct"]) / 100 * _peak_of(row)
        return job.tokens_per_step * _counted_flops(row, job) / (rate * gpus)
    return None


def _peak_of(row: Fields) -> float:
    """The peak that a row's MFU is a share of: its GPU's in the row's format, or the figure near it that the notes say
    was used."""
    gpu = gpu_by_key(_gpu_key(row))
    known = peak_flops(gpu, row["precision"] or "bf16") or peak_flops(gpu, "fp16")
    if known is None:
        raise Unpredicted(f"gives an MFU, and no peak of its GPU {row['gpu']} in {row['precision'] or 'bf16'} is known")
    if "peak" not in row["notes"]:
        return known
    said = (float(number) * 1e12 for number in re.findall(r"\b(\d{3,4}(?:\.\d+)?)\b", row["notes"]))
    return min((one for one in said if abs(one / known - 1) < 0.2), key=lambda one: abs(one - known), default=known)


def _counted_flops(row: Fields, job: Job) -> float:
    """FLOPs per token as the source counts them."""
    about = f"{row['source']} {row['notes']}"
    if re.search(r"HW FLOPs|HW TFLOPs|96B", about):
        model, sequence = job.model, job.batch.sequence_length
        blocks = 96 * model.layers * model.width**2
        return blocks * (1 + sequence / (6 * model.width) + model.vocab_size / (16 * model.layers * model.width))
    causal = re.search(r"causal|Megatron-Bridge|Automodel", about) and "non-causal" not in about
    return flops_per_token(job.model, job.batch.sequence_length, "causal" if causal else "full")


def counted_by(row: Fields) -> Literal["allocated", "reserved", "device"]:
    """How a run's memory was counted: by the device if with nvidia-smi, as reserved by the allocator where torchtitan
    printed it, else as allocated."""
    if "nvidia-smi" in row["notes"]:
        return "device"
    return "reserved" if "torchtitan" in row["source"] else "allocated"
