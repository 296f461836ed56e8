"""Megatron-LM's arguments as a job: their argument → ours."""

import re
from pathlib import Path
from typing import Any

from meshwright.job.convert import ANY, Conversion, Converted, Noted, Passed
from meshwright.job.megatron_arguments import rule_of
from meshwright.job.megatron_layout import convert_gather, convert_layout, convert_memory, convert_overlap
from meshwright.job.reading import read_settings_text
from meshwright.job.shell_arguments import Script, arguments_of, read_script, unknowns

GPT2_VOCABULARY = 50257
_PATHS = ("--save", "--load", "--tokenizer-model")
"""A job is complete without them."""
_GIVEN = ("--tensorboard-dir", "--wandb-project")
"""That they are given is all that counts here."""
FP16_NOTE = (
    "fp16: the loss scale starts at 2^16 (2^32 there), is halved at every overflow (no hysteresis) and doubled after "
    "2000 steps without one; gradients are summed in fp32"
)


def job_from_megatron(path: Path, gpus: int | None = None) -> Converted:
    """The job of a script's or file's Megatron-LM arguments on this many GPUs; what has no counterpart is an error.

    Arguments that are not given have Megatron's default, not ours.
    """
    text = read_settings_text(path, "give the script, or a file with its arguments")
    script = _yaml(text) if path.suffix in (".yaml", ".yml") else read_script(text, str(path))
    conversion = Conversion(arguments_of(script.words))
    _drop_unknown(conversion)
    _model(conversion)
    _positions(conversion)
    data_parallel = convert_layout(conversion, script, gpus)
    _batch(conversion, data_parallel)
    _precision(conversion)
    convert_overlap(conversion)
    convert_memory(conversion)
    convert_gather(conversion)
    _optimizer(conversion)
    _schedule(conversion)
    _data(conversion)
    _saving(conversion)
    conversion.apply({name: rule for name in conversion.settings if (rule := rule_of(name)) is not None})
    return conversion.finish(str(path))


def _yaml(text: str) -> Script:
    """The arguments of a YAML text, `--num-layers: 32` a line; anything without dashes is something else."""
    words: list[str] = []
    for name, value in re.findall(r"^\s*(--[A-Za-z][\w-]*):[ \t]+([^#\n]+)", text, re.MULTILINE):
        plain = value.strip().strip("'\"")
        if plain.lower() not in ("false", "null", "none", "~"):
            words += [name, *([] if plain.lower() == "true" else plain.split())]
    return Script(words=words)


def _drop_unknown(conversion: Conversion) -> None:
    """Arguments whose value only running the script would tell: paths are said to be missing, others are refused."""
    for name in list(conversion.settings):
        if not (missing := unknowns(conversion.settings[name])):
            continue
        conversion.settings[name] = missing[0]
        rule = rule_of(name)
        if name in _PATHS:
            del conversion.settings[name]
            conversion.notes.append(f"{name} depends on {missing[0]}, which the file does not set, and is left out")
        elif name not in _GIVEN and not (isinstance(rule, Noted) or (isinstance(rule, Passed) and rule.values is ANY)):
            conversion.taken.add(name)
            conversion.refuse(name, "write its value", "depends on what only the script's run would tell")


def _model(conversion: Conversion) -> None:
    """The shape of the decoder → model."""
    fields = conversion.fields
    layers, width, heads = (
        conversion.count(f"--{name}") for name in ("num-layers", "hidden-size", "num-attention-heads")
    )
    gated = conversion.switch("--swiglu")
    usual = int(4 * width * 2 / 3 / 64) * 64 if gated else 4 * width  # as Megatron chooses it
    groups = conversion.count("--num-query-groups", 1)
    grouped = conversion.switch("--group-query-attention")
    fields["model.layers"], fields["model.width"], fields["model.heads"] = layers, width, heads
    fields["model.kv_heads"] = groups if grouped else heads
    fields["model.head_dim"] = conversion.count("--kv-channels", max(1, width // heads))
    fields["model.ffn_width"] = conversion.count("--ffn-hidden-size", max(1, usual))
    fields["model.activation"] = "swiglu" if gated else "gelu"
    if not gated:
        conversion.notes.append("GELU is approximated with tanh here")
    norm = conversion.word("--normalization", "LayerNorm")
    if norm not in ("LayerNorm", "RMSNorm"):
        conversion.refuse("--normalization", "use LayerNorm or RMSNorm")
    fields["model.norm"] = str(norm).lower() if norm in ("LayerNorm", "RMSNorm") else "layernorm"
    old = conversion.number("--layernorm-epsilon", 1e-5)
    fields["model.norm_eps"] = float(conversion.number("--norm-epsilon", old))
    plain = conversion.switch("--disable-bias-linear")
    own = conversion.switch("--add-qkv-bias")
    fields["model.qkv_bias"], fields["model.linear_bias"] = own or not plain, not plain
    if conversion.switch("--qk-layernorm"):
        fields["model.qk_norm"] = True
        if norm != "RMSNorm":
            conversion.refuse("--qk-layernorm", "query and key norms are RMSNorm here: use --normalization RMSNorm")
    fields["model.tied"] = not conversion.switch("--untie-embeddings-and-output-weights")
    fields["model.dropout"] = float(conversion.number("--hidden-dropout", 0.1))
    if "--attention-dropout" not in conversion.settings:
        conversion.notes.append("--attention-dropout is 0.1 by default there and has no counterpart: it is 0 here")
    _vocabulary(conversion)


def _vocabulary(conversion: Conversion) -> None:
    """vocab-size, padded-vocab-size or the tokenizer → model.vocab_size."""
    kind = conversion.word("--tokenizer-type", "GPT2BPETokenizer" if "--vocab-file" in conversion.settings else None)
    padded, size = conversion.number("--padded-vocab-size"), conversion.number("--vocab-size")
    if padded is None and size is None and kind == "GPT2BPETokenizer":
        size = GPT2_VOCABULARY
    if padded is None and size is None:
        conversion.refuse("--vocab-size", "write the tokenizer's number of tokens, which the arguments leave to it")
        return
    conversion.fields["model.vocab_size"] = padded or size
    if padded is None:
        conversion.notes.append(
            f"the vocabulary is {size} tokens, padded to a multiple of layout.tp; Megatron pads it to a multiple of "
            "--make-vocab-size-divisible-by × tensor-parallel ranks"
        )


def _positions(conversion: Conversion) -> None:
    """Positions, their longest, and the window of attention → model."""
    fields = conversion.fields
    fields["batch.sequence_length"] = conversion.count("--seq-length")
    fields["model.max_sequence_length"] = conversion.count("--max-position-embeddings", fields["batch.sequence_length"])
    rotary = conversion.switch("--use-rotary-position-embeddings")
    kind = conversion.word("--position-embedding-type", "rope" if rotary else "learned_absolute")
    none = conversion.switch("--no-position-embedding")
    if kind not in ("rope", "learned_absolute") or (none and kind != "rope"):
        conversion.refuse(
            "--no-position-embedding" if none else "--position-embedding-type", "use rope or learned_absolute"
        )
    scaled = conversion.switch("--use-rope-scaling")
    base, factor = conversion.number("--rotary-base", 10000), conversion.number("--rope-scaling-factor", 8.0)
    if kind != "rope":
        fields["model.positions"] = "learned"
        return
    fields["model.rope_theta"] = float(base)
    if scaled:
        fields["model.rope_scaling"] = {"factor": float(factor)}
    window = conversion.take("--window-size")
    if window is None:
        return
    found = re.fullmatch(r"\(?(\d{1,9}),\s*(-?\d)\)?", str(window))
    if found and found[2] in ("0", "-1"):
        fields["model.sliding_window"] = int(found[1]) + 1  # theirs counts the tokens before it
    else:
        conversion.refuse("--window-size", "write the tokens before and 0 after, as 127,0")


def _batch(conversion: Conversion, data_parallel: int) -> None:
    """micro-batch-size, global-batch-size and the length of the run → batch, run.steps."""
    micro = conversion.count("--micro-batch-size")
    whole = conversion.count("--global-batch-size", micro * data_parallel)
    conversion.fields["batch.micro_batch"], conversion.fields["batch.global_batch"] = micro, whole
    steps = _steps(conversion, "train")
    if steps is None:
        conversion.refuse("--train-iters", "write the number of steps")
    else:
        conversion.fields["run.steps"] = steps


def _steps(conversion: Conversion, what: str) -> int | None:
    """A length in iterations, or in samples of which a step has a batch."""
    iterations, samples = (conversion.number(f"--{what}-{unit}") for unit in ("iters", "samples"))
    if iterations is None and samples is None:
        return None
    return int(iterations if iterations is not None else samples // conversion.fields["batch.global_batch"])


def _precision(conversion: Conversion) -> None:
    """bf16, fp16, fp8-format, the formats of gradients and moments → precision."""
    fields = conversion.fields
    bf16, fp16 = conversion.switch("--bf16"), conversion.switch("--fp16")
    if bf16 and fp16:
        conversion.refuse("--fp16", "keep one of them", "contradicts --bf16")
    eight, recipe = conversion.word("--fp8-format"), conversion.word("--fp8-recipe", "delayed")
    if eight is not None and recipe == "blockwise":
        if eight != "e4m3":
            conversion.refuse("--fp8-format", "gradients with scales of blocks are e4m3 here: use e4m3")
        fields["precision.fp8_scales"] = "block"
        conversion.notes.append("fp8: scales of blocks are not rounded to powers of two")
    elif eight is not None:
        if eight != "hybrid":
            conversion.refuse("--fp8-format", "gradients with one scale per tensor are e5m2 here: use hybrid")
        if recipe not in ("delayed", "tensorwise"):
            conversion.refuse("--fp8-recipe", "scales are per tensor or per block here: use tensorwise or blockwise")
        conversion.notes.append("fp8: scales follow the tensor at hand (tensorwise), not a history of maxima")
    fields["precision.compute"] = "fp8" if eight is not None else "bf16" if bf16 else "fp16" if fp16 else "fp32"
    if fp16:
        conversion.notes.append(FP16_NOTE)
    low = conversion.switch("--grad-reduce-in-bf16") or conversion.word("--main-grads-dtype", "fp32") == "bf16"
    if low:
        fields["precision.gradients"] = "bf16"
    moments = {conversion.word(f"--{name}-dtype", "fp32") for name in ("exp-avg", "exp-avg-sq")}
    conversion.switch("--use-precision-aware-optimizer")
    if moments == {"bf16"}:
        fields["precision.optimizer_states"] = "bf16"
    elif moments != {"fp32"}:
        name = "exp-avg" if "--exp-avg-dtype" in conversion.settings else "exp-avg-sq"
        conversion.refuse(f"--{name}-dtype", "both moments have one format here, fp32 or bf16: set both")
    if conversion.word("--main-params-dtype", "fp32") != "fp32":
        conversion.refuse("--main-params-dtype", "master weights are fp32 here: remove it")


def _optimizer(conversion: Conversion) -> None:
    """optimizer, lr, betas, decay and clipping → optimizer."""
    fields = conversion.fields
    kind = conversion.word("--optimizer", "adam")
    momentum = conversion.number("--sgd-momentum", 0.9)
    if kind not in ("adam", "sgd"):
        conversion.refuse("--optimizer", "use adam or sgd, and set [optimizer] by hand")
    fields["optimizer.name"] = "sgd" if kind == "sgd" else "adamw"
    rate = conversion.number("--lr")
    if rate is None:
        conversion.refuse("--lr", "write it")
    else:
        fields["optimizer.lr"] = float(rate)
    betas = [float(conversion.number(f"--adam-beta{one}", usual)) for one, usual in ((1, 0.9), (2, 0.999))]
    eps = float(conversion.number("--adam-eps", 1e-8))
    if kind == "sgd":
        fields["optimizer.momentum"] = float(momentum)
    else:
        fields["optimizer.betas"], fields["optimizer.eps"] = betas, eps
    fields["optimizer.weight_decay"] = float(conversion.number("--weight-decay", 0.01))
    fields["optimizer.clip"] = float(conversion.number("--clip-grad", 1.0))


def _schedule(conversion: Conversion) -> None:
    """lr-decay-style, warm-up and floor → schedule."""
    fields, style = conversion.fields, conversion.word("--lr-decay-style", "linear")
    steps = fields.get("run.steps", 1)
    decay = _steps(conversion, "lr-decay") or steps
    annealing, shape = _steps(conversion, "lr-wsd-decay"), conversion.word("--lr-wsd-decay-style", "exponential")
    fraction = conversion.number("--lr-warmup-fraction")
    warmup = _steps(conversion, "lr-warmup") or 0
    warmup = warmup if fraction is None else int(fraction * decay)
    lowest, peak = conversion.number("--min-lr", 0.0), fields.get("optimizer.lr") or 1.0
    names = {"constant": "constant", "cosine": "cosine", "linear": "wsd", "WSD": "wsd"}
    if style not in names:
        conversion.refuse("--lr-decay-style", f"use one of {', '.join(names)}")
        return
    fields["schedule.name"], fields["schedule.warmup_steps"] = names[style], warmup
    if style == "constant":
        return
    fields["schedule.min_lr_ratio"] = float(lowest / peak)
    if decay != steps:
        given = next((name for name in ("--lr-decay-iters", "--lr-decay-samples") if name in conversion.settings), "")
        conversion.refuse(given, f"the decay ends with the run here: write {steps} steps, or train as long")
    if style == "WSD" and (shape != "linear" or annealing is None):
        conversion.refuse("--lr-wsd-decay-style", "the decay is linear here: write linear, and --lr-wsd-decay-iters")
    elif style == "WSD":
        fields["schedule.decay_steps"] = annealing
    elif style == "linear":
        fields["schedule.decay_steps"] = max(0, steps - warmup)


def _data(conversion: Conversion) -> None:
    """Workers, the held-out part, masks between documents → data; the tokens themselves are not read."""
    fields = conversion.fields
    fields["data.workers"] = conversion.number("--num-workers", 2)
    if conversion.switch("--mock-data"):
        fields["data.sources"] = ["builtin:synthetic"]
    else:
        conversion.notes.append(
            "data.sources is not set: Megatron's .bin and .idx files are not read; prepare the text with "
            "meshwright data prepare"
        )
    split = conversion.take("--split")
    if split is not None and "data.sources" not in fields:
        parts = re.findall(r"\d+(?:\.\d+)?", str(split))
        shares = [float(part) for part in parts]
        if len(shares) != 3 or not sum(shares) or shares[1] >= sum(shares) / 2:
            conversion.refuse("--split", "write three shares, with less than half for validation", "is not a split")
        else:
            fields["data.validation_fraction"] = shares[1] / sum(shares)
    masks = [conversion.switch(f"--reset-{what}") for what in ("position-ids", "attention-mask")]
    if all(masks):
        fields["data.mask_documents"] = True
    elif any(masks):
        name = "position-ids" if masks[0] else "attention-mask"
        conversion.refuse(f"--reset-{name}", "data.mask_documents resets both: write both or neither")
    model = conversion.settings.get("--tokenizer-model")
    if isinstance(model, str) and model.endswith("tokenizer.json"):
        fields["data.tokenizer"] = conversion.take("--tokenizer-model")


def _saving(conversion: Conversion) -> None:
    """Checkpoints, evaluation, logs, seed → checkpoint, evaluation, log, run."""
    fields = conversion.fields
    folder, every = conversion.word("--save"), conversion.number("--save-interval")
    every = conversion.number("--persistent-save-interval", every)
    retained: Any = conversion.settings.get("--save-retain-interval")
    if folder is not None:
        fields["run.folder"] = str(folder)
    if every is not None:
        fields["checkpoint.every_steps"] = every
        fields["checkpoint.keep_every"] = retained if isinstance(retained, int) else every
    interval, batches = conversion.number("--eval-interval", 1000), conversion.number("--eval-iters", 100)
    fields["evaluation.every_steps"] = interval if batches else 0
    if batches:
        fields["evaluation.batches"] = batches
    fields["log.every_steps"] = conversion.number("--log-interval", 100)
    given = (("tensorboard", "--tensorboard-dir"), ("wandb", "--wandb-project"))
    if sinks := [sink for sink, name in given if conversion.take(name)]:
        fields["log.sinks"] = sinks
    fields["run.seed"] = conversion.number("--seed", 1234)
    if conversion.switch("--deterministic-mode"):
        fields["run.deterministic"] = True
