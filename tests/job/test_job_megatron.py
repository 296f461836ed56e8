"""Megatron-LM's arguments become a job that plans, or are refused by name; scripts are read, and never run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.cost import parameter_count
from meshwright.errors import UserError
from meshwright.job import Converted, Model, job_from_megatron, job_text, load_job, model_preset
from meshwright.job.megatron_arguments import RULES, rule_of
from meshwright.job.shell_arguments import arguments_of, read_script, unknowns

SCRIPTS = Path(__file__).parent / "megatron"
SMALL = """--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
--vocab-size 1000 --micro-batch-size 2 --train-iters 100 --lr 1e-3 --attention-dropout 0"""


def convert(folder: Path, text: str, gpus: int | None = None) -> Converted:
    (folder / "args.txt").write_text(f"{SMALL} {text}")
    return job_from_megatron(folder / "args.txt", gpus)


def refusal(folder: Path, text: str, gpus: int | None = None) -> str:
    with pytest.raises(UserError) as caught:
        convert(folder, text, gpus)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_llama_3_8b_is_the_published_shape() -> None:
    found = job_from_megatron(SCRIPTS / "llama3-8b.sh")
    job = found.job
    preset = Model.model_validate(model_preset("llama-3-8b"))
    assert job.model.model_copy(update={"preset": None, "init_std": preset.init_std}) == preset
    assert parameter_count(job.model) == 8_030_261_248
    assert (job.layout.tp, job.layout.dp_shard, job.layout.zero, job.layout.sp) == (2, 8, 1, True)
    assert (job.batch.global_batch, job.batch.micro_batch, job.batch.sequence_length) == (128, 1, 8192)
    assert (job.run.steps, job.schedule.warmup_steps, job.run.folder) == (10000, 100, "checkpoints/llama3_8b")
    assert job.schedule.min_lr_ratio == pytest.approx(0.1)
    assert job.optimizer.betas == (0.9, 0.95) and job.precision.compute == "bf16"
    assert any("data.sources is not set" in note for note in found.notes)
    assert job.model.init_std == 0.0134 and job.model.embed_std is None


def test_gpt_3_has_its_175_billion_parameters_and_its_interleaved_pipeline() -> None:
    found = job_from_megatron(SCRIPTS / "gpt3-175b.sh")
    job = found.job
    layers, width, vocabulary, positions = 96, 12288, 50257, 2048
    by_hand = layers * (12 * width**2 + 13 * width) + (vocabulary + positions) * width + 2 * width
    assert parameter_count(job.model) == by_hand == pytest.approx(174.6e9, rel=1e-3)
    assert (job.layout.tp, job.layout.pp, job.layout.dp_replicate, job.layout.dp_shard) == (8, 8, 16, 1)
    assert (job.layout.schedule, job.layout.virtual_stages) == ("interleaved", 3)
    assert (job.memory.recompute, job.precision.compute, job.log.sinks) == ("full", "fp16", ("tensorboard",))
    assert (job.schedule.warmup_steps, job.data.validation_fraction) == (95, 0.05)
    assert job.model.dropout == 0.1
    notes = "\n".join(found.notes)
    assert "--save depends on `pwd`" in notes and "2^16 (2^32 there)" in notes and "GELU" in notes


def test_overlapped_tensor_parallelism_is_compiled_here(tmp_path: Path) -> None:
    asked = "--tensor-model-parallel-size 2 --tp-comm-overlap"
    found = convert(tmp_path, f"{asked} --sequence-parallel --bf16")
    assert (found.job.layout.async_tp, found.job.layout.sp, found.job.run.compile) == (True, True, True)
    assert any("for which blocks are compiled" in note for note in found.notes)
    assert "layout.async_tp" not in convert(tmp_path, asked).fields
    narrow = convert(tmp_path, f"{asked} --sequence-parallel --bf16 --fp8-format hybrid")
    assert "layout.async_tp" not in narrow.fields and any("--tp-comm-overlap is left" in note for note in narrow.notes)


def test_arguments_in_yaml_are_read_too() -> None:
    job = job_from_megatron(SCRIPTS / "mistral-7b.yaml", gpus=16).job
    assert parameter_count(job.model) == 7_241_732_096  # as Mistral 7B's own files hold
    assert (job.model.sliding_window, job.model.max_sequence_length, job.model.positions) == (4096, 32768, "rope")
    assert (job.layout.cp, job.layout.cp_method) == (2, "ulysses")
    assert (job.layout.dp_replicate, job.layout.dp_shard, job.layout.zero) == (2, 4, 1)
    assert (job.precision.compute, job.precision.gradients, job.memory.recompute) == ("fp8", "bf16", "selective")
    assert (job.schedule.name, job.schedule.decay_steps, job.schedule.warmup_steps) == ("wsd", 100, 50)
    assert job.data.sources == ("builtin:synthetic",)


@pytest.mark.parametrize(
    ("script", "options", "cluster"),
    [
        ("llama3-8b.sh", [], "2x8xh100"),
        ("gpt3-175b.sh", [], "128x8xa100-80gb"),
        ("mistral-7b.yaml", ["--gpus", "16"], "2x8xh100"),
    ],
)
def test_what_is_written_loads_as_the_same_job_and_plans(
    cli, tmp_path: Path, script: str, options: list[str], cluster: str
) -> None:
    shutil.copy(SCRIPTS / script, tmp_path / script)
    told = cli("job", "from-megatron", script, *options, "--out", "job.toml")
    assert told.code == 0, told.err
    assert load_job("job.toml").job == job_from_megatron(SCRIPTS / script, int(options[1]) if options else None).job
    told = cli("plan", "--check", "job.toml", "--cluster", cluster, "--json")
    assert told.code in (0, 1), told.err  # 1: it does not fit
    assert json.loads(told.out)["step_s"] > 0


def test_megatron_s_defaults_are_its_own_not_ours(tmp_path: Path) -> None:
    (tmp_path / "args.txt").write_text(SMALL.replace("--attention-dropout 0", ""))
    found = job_from_megatron(tmp_path / "args.txt", 4)
    expected = {
        "model.ffn_width": 1024, "model.activation": "gelu", "model.norm": "layernorm", "model.qkv_bias": True,
        "model.linear_bias": True, "model.tied": True, "model.positions": "learned", "model.dropout": 0.1,
        "batch.global_batch": 8, "layout.dp_replicate": 4, "precision.compute": "fp32", "optimizer.betas": [0.9, 0.999],
        "optimizer.weight_decay": 0.01, "schedule.name": "wsd", "schedule.decay_steps": 100, "run.seed": 1234,
        "schedule.min_lr_ratio": 0.0, "evaluation.every_steps": 1000, "log.every_steps": 100,
    }  # fmt: skip
    assert found.fields.items() >= expected.items()
    assert any("--attention-dropout is 0.1 by default there" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        ("--swiglu", None, {"model.activation": "swiglu", "model.ffn_width": 640}),
        ("--use-rotary-position-embeddings --no-position-embedding", None, {"model.rope_theta": 10000.0}),
        ("--position-embedding-type rope --use-rope-scaling", None, {"model.rope_scaling": {"factor": 8.0}}),
        ("--disable-bias-linear --add-qkv-bias", None, {"model.qkv_bias": True, "model.linear_bias": False}),
        ("--qk-layernorm --normalization RMSNorm", None, {"model.qk_norm": True, "model.norm": "rmsnorm"}),
        ("--padded-vocab-size 1024", None, {"model.vocab_size": 1024}),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1", None, {"layout.split": [1, 3]}),
        ("--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping", 4, {"layout.order": "dp-outside"}),
        ("--use-torch-fsdp2", 4, {"layout.dp_shard": 4, "layout.zero": 3}),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", 4, {"layout.zero": 2}),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
            4,
            {"layout.dp_shard": 4, "layout.zero": 2},
        ),
        ("--context-parallel-size 2 --cp-comm-type all_gather", None, {"layout.cp_method": "allgather"}),
        ("--tensor-model-parallel-size 2", None, {"layout.tp": 2, "layout.sp": False}),
        ("--recompute-activations", None, {"memory.recompute": "selective"}),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 4",
            None,
            {"memory.recompute": "full"},
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            None,
            {"memory.recompute": {"segments": 2}},
        ),
        ("--optimizer-cpu-offload", None, {"memory.offload": ["optimizer"]}),
        ("--optimizer sgd --sgd-momentum 0.8", None, {"optimizer.name": "sgd", "optimizer.momentum": 0.8}),
        ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", None, {"precision.optimizer_states": "bf16"}),
        (
            "--lr-decay-style constant --lr-warmup-iters 7",
            None,
            {"schedule.name": "constant", "schedule.warmup_steps": 7},
        ),
        ("--reset-position-ids --reset-attention-mask", None, {"data.mask_documents": True}),
        ("--eval-iters 0", None, {"evaluation.every_steps": 0}),
        ("--save out --save-interval 10 --save-retain-interval 50", None, {"checkpoint.keep_every": 50}),
        ("--bf16 --fp8-format e4m3 --fp8-recipe blockwise", None, {"precision.fp8_scales": "block"}),
        (
            "--bf16 --fp8-format hybrid --fp8-param-gather --use-distributed-optimizer",
            8,
            {"precision.fp8_gather": True, "layout.zero": 1},
        ),
        ("--wandb-project mine --seed 7", None, {"log.sinks": ["wandb"], "run.seed": 7}),
        ("--tokenizer-model tok/tokenizer.json", None, {"data.tokenizer": "tok/tokenizer.json"}),
        ("--global_batch_size=16 --log-interval=5", None, {"batch.global_batch": 16, "log.every_steps": 5}),
    ],
)  # fmt: skip
def test_arguments_with_a_counterpart(tmp_path: Path, text: str, gpus: int | None, expected: dict[str, Any]) -> None:
    assert convert(tmp_path, text, gpus).fields.items() >= expected.items()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--rampup-batch-size 16 16 5859375", "--rampup-batch-size = [16, 16, 5859375] has no counterpart here; the"),
        ("--num-experts 8", "--num-experts = 8 has no counterpart here; experts are not translated"),
        ("--moe-router-topk 2", "--moe-router-topk = 2 has no counterpart here; experts are not translated"),
        ("--multi-latent-attention", "--multi-latent-attention = true has no counterpart here"),
        ("--lr-decay-iters 80", "--lr-decay-iters = 80 has no counterpart here; the decay ends with the run"),
        ("--lr-decay-style WSD", "--lr-wsd-decay-style is not given; the decay is linear here"),
        ("--attention-dropout 0.1", "--attention-dropout = 0.1 has no counterpart here; no fused kernel"),
        ("--position-embedding-type relative", '--position-embedding-type = "relative" has no counterpart here'),
        ("--fp16 --bf16", "--fp16 = true contradicts --bf16; keep one of them"),
        ("--fp8-format e4m3", '--fp8-format = "e4m3" has no counterpart here'),
        ("--fp8-format hybrid --fp8-recipe blockwise", '--fp8-format = "hybrid" has no counterpart here'),
        ("--fp8-format hybrid --fp8-recipe mxfp8", '--fp8-recipe = "mxfp8" has no counterpart here'),
        ("--recompute-granularity full --recompute-method block", "budget_gib"),
        ("--optimizer muon", '--optimizer = "muon" has no counterpart here'),
        ("--tensor-model-parallel-size two", '--tensor-model-parallel-size = "two" is not a number'),
        ("--hidden-size 0", "--hidden-size = 0 is not a whole number above 0; correct it"),
        ("--my-own-flag", "--my-own-flag = true is not a setting known here; remove it if the run does not need it"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy all", "use one of no_shard, optim"),
        ("--reset-position-ids", "data.mask_documents resets both: write both or neither"),
        ("--seed $SEED", '--seed = "$SEED" depends on what only the script\'s run would tell; write its value'),
    ],
)  # fmt: skip
def test_arguments_without_one_are_refused_by_name(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in refusal(tmp_path, text)


def test_what_is_missing_is_named_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "args.txt").write_text("--bf16")
    with pytest.raises(UserError) as caught:
        job_from_megatron(tmp_path / "args.txt")
    named = [line.split(": ", 1)[1].split(" is not given")[0] for line in str(caught.value).splitlines()]
    required = {"--num-layers", "--hidden-size", "--vocab-size", "--micro-batch-size", "--train-iters", "--lr"}
    assert required <= set(named)


def test_gpus_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    text = "--tensor-model-parallel-size 4"
    assert "--gpus = 6 is not a multiple of tensor × pipeline × context = 4" in refusal(tmp_path, text, 6)
    assert any("give --gpus" in note for note in convert(tmp_path, text).notes)


def test_every_argument_that_is_known_is_accepted_or_refused_in_its_own_words(tmp_path: Path) -> None:
    for name in RULES:
        try:
            convert(tmp_path, f"{name} zzz")
        except UserError as error:
            assert f'{name} = "zzz"' in str(error) and "known here" not in str(error)
    assert rule_of("--moe-anything") is not None and rule_of("--anything") is None


def test_a_script_is_read_as_the_shell_would(tmp_path: Path) -> None:
    script = read_script(
        "A=3; B=${A}0  # not C=4\n"
        "export N=$((A * (2 + 1)))\n"
        "ARGS=(\n  --one $B # --not this\n  '--two 2'\n  --three=\"x y\"\n)\n"
        'ARGS+=(--four "${N}" --five ${FIVE:-5})\n'
        "if [ -n \"$X\" ]; then ARGS+=(--six 6); else echo 'fi'; fi\n"
        "Y='two \\\n lines'\nif x; then\n ARGS+=(--ten 10)\nfi\n"
        'X=1 torchrun --nproc_per_node $N train.py "${ARGS[@]}" \\\n'
        ' --seven $(cat n) --eight `id` --nine "<unk>" > log 2>&1',
        "script.sh",
    )
    table = arguments_of(script.words)
    assert {name: table[name] for name in ("--one", "--two", "--four", "--five")} == {
        "--one": 30, "--two": 2, "--four": 9, "--five": 5,
    }  # fmt: skip
    assert set(unknowns(table["--six"])) == {"an if or a loop at line 9"}
    assert set(unknowns(table["--ten"])) == {"an if or a loop at line 13"}
    assert unknowns(table["--seven"])[:1] == ["$(cat n)"] and unknowns(table["--eight"])[:1] == ["`id`"]
    assert table["--nine"] == "<unk>"
    assert arguments_of(script.launcher)["--nproc-per-node"] == [9, "train.py"]


@pytest.mark.parametrize(
    "text",
    [
        "X='open",
        "A=(--one",
        "A0=xxxxxxxxxxxxxxxx\n" + "".join(f"A{i + 1}=$A{i}$A{i}\n" for i in range(60)) + "python x.py --a $A60",
        "X=$((" + "9*" * 400 + "9))\npython x.py --a $X",
        "X=$((" + "(" * 50 + "))\n",
        "\0\0\0", "", "#", "--", "fi\nfi\ndone", "$", "${", "`", "$(", "a=${b:-${c:-${d}}}",
    ],
)  # fmt: skip
def test_no_script_whatever_is_more_than_a_mistake(tmp_path: Path, text: str) -> None:
    (tmp_path / "script.sh").write_text(text)
    with pytest.raises(UserError, match=r"script\.sh: "):
        job_from_megatron(tmp_path / "script.sh")


def test_no_value_whatever_is_more_than_a_mistake(tmp_path: Path) -> None:
    names = [word for word in (SMALL + (SCRIPTS / "gpt3-175b.sh").read_text()).split() if word.startswith("--")]
    names += [line.split(":")[0].strip() for line in (SCRIPTS / "mistral-7b.yaml").read_text().splitlines()]
    for name in {name for name in names if name.startswith("--")}:
        for value in ("", "zzz", "-1", "0", "1.5", "1e300", "nan", "inf", "9" * 5000, "1 2 3", "true", "auto"):
            try:
                convert(tmp_path, f"--pipeline-model-parallel-size 2 {name} {value}", 8)
            except UserError as error:
                assert "args.txt" in str(error)


def test_the_written_job_says_what_was_lost(tmp_path: Path) -> None:
    found = convert(tmp_path, "--load old --init-method-std 0.01")
    text = job_text(found.job, "\n".join(f"note: {note}" for note in found.notes))
    assert '# note: --load = "old": a run resumes from its own folder' in text
