"""DeepSpeed's and the Hugging Face Trainer's settings become a job, or are refused by name, all of them at once."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.job import Converted, Job, job_from_deepspeed, job_from_hf_trainer, job_text, load_job
from meshwright.job.from_hf_trainer import RULES
from meshwright.layout import require_layout

Settings = dict[str, Any]
ADAMW = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
DEEPSPEED: Settings = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 5e8},
    "optimizer": ADAMW,
}


def deepspeed(folder: Path, settings: Settings, ranks: int | None = None) -> Converted:
    (folder / "ds_config.json").write_text(json.dumps(settings))
    return job_from_deepspeed(folder / "ds_config.json", ranks)


def trainer(folder: Path, settings: Settings, ranks: int | None = None) -> Converted:
    (folder / "args.json").write_text(json.dumps({"output_dir": "runs/x", "max_steps": 100, **settings}))
    return job_from_hf_trainer(folder / "args.json", ranks)


def arguments_of_transformers() -> Settings:
    """Every field of TrainingArguments with its default, under the names the installed version has."""
    transformers = pytest.importorskip("transformers")
    fields = [field for field in dataclasses.fields(transformers.TrainingArguments) if field.init]
    missing = dataclasses.MISSING
    values = {f.name: f.default if f.default is not missing else f.default_factory() for f in fields}
    return json.loads(json.dumps(values, default=str))


def test_a_deepspeed_configuration_becomes_a_job(tmp_path: Path) -> None:
    found = deepspeed(tmp_path, DEEPSPEED)
    assert found.fields == {
        "batch.global_batch": 64,
        "batch.micro_batch": 2,
        "layout.dp_shard": 8,
        "layout.zero": 3,
        "precision.compute": "bf16",
        "optimizer.name": "adamw",
        "optimizer.lr": 3e-4,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.1,
        "optimizer.clip": 0.5,
    }
    assert found.job.accumulation == 4
    path = tmp_path / "job.toml"
    path.write_text(job_text(found.job, "from a test"))
    assert load_job(str(path)).job == found.job


@pytest.mark.parametrize(
    ("change", "ranks", "expected"),
    [
        ({"train_batch_size": None}, 8, {"batch.global_batch": 64}),
        ({"gradient_accumulation_steps": None}, 4, {"batch.micro_batch": 2, "layout.dp_shard": 4}),
        ({"zero_optimization": {"stage": 0}}, None, {"layout.dp_replicate": 8}),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}},
            None,
            {"layout.zero": 2, "memory.offload": ["optimizer"]},
        ),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 0}}, None, {"precision.compute": "fp16"}),
        ({"wandb": {"enabled": True}}, None, {"log.sinks": ["wandb"]}),
        ({"amp": {}, "zero_optimization": {"stage": 1, "offload_optimizer": None}}, None, {"layout.zero": 1}),
        ({"steps_per_print": 2000, "elasticity": {"enabled": False, "x": 1}}, None, {"log.every_steps": 2000}),
        ({"tensor_parallel": {"autotp_size": 2}}, None, {"layout.tp": 2, "layout.sp": False}),
        (
            {
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {
                        "total_num_steps": 50,
                        "warmup_num_steps": 5,
                        "warmup_max_lr": 3e-4,
                        "warmup_type": "linear",
                    },
                }
            },
            None,
            {"schedule.name": "wsd", "schedule.decay_steps": 45, "schedule.min_lr_ratio": 0.0, "run.steps": 50},
        ),
    ],
)
def test_deepspeed_settings_with_a_counterpart(
    tmp_path: Path, change: Settings, ranks: int | None, expected: Settings
) -> None:
    settings = {key: value for key, value in (DEEPSPEED | change).items() if value is not None}
    fields = deepspeed(tmp_path, settings, ranks).fields
    assert fields.items() >= expected.items()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights =",
        ),
        ({"zero_optimization": {"stage": 3, "reduce_bucket_size": 2e8}}, "zero_optimization.reduce_bucket_size = 2000"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            'offload_param.device = "nvme" has no',
        ),
        ({"bf16": {"enabled": "yes"}}, 'bf16.enabled = "yes" is neither true nor false; correct it'),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4 is not a stage; write 0, 1, 2 or 3"),
        (
            {"optimizer": {"type": "Lamb", "params": {"lr": 1}}},
            'optimizer.type = "Lamb" has no counterpart here; use Adam',
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4}}},
            "scheduler.params.warmup_type is not given",
        ),
        (
            {"flops_profiler": {"enabled": True, "x": 1}},
            "flops_profiler.enabled = true has no counterpart here; switch",
        ),
        ({"pipeline": {"stages": 4}}, "pipeline.stages = 4 is not a setting known here; remove it"),
        ({"train_batch_size": 63}, "train_batch_size = 63 does not fit"),
        ({"train_micro_batch_size_per_gpu": "two"}, 'train_micro_batch_size_per_gpu = "two" is not a number'),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "is not a valid value for precision.gradients"),
        ({"fp16": {"enabled": True}}, "fp16.enabled = true contradicts bf16; keep one of them"),
    ],
)
def test_deepspeed_settings_without_one_are_refused_by_name(tmp_path: Path, change: Settings, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        deepspeed(tmp_path, DEEPSPEED | change)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


LECTURE = """
{
"zero_optimization": {
"stage": 3,
"offload_optimizer": {"device": "cpu"},
"offload_param": {"device": "cpu"},
"overlap_comm": true,
"contiguous_gradients": true,
"sub_group_size": 1e9,
"reduce_bucket_size": 5e8,
"stage3_prefetch_bucket_size": 5e8,
"stage3_param_persistence_threshold": 1e6
}
}
"""


def test_the_lectures_own_zero_3_file_converts_as_it_is_written(tmp_path: Path) -> None:
    found = deepspeed(tmp_path, json.loads(LECTURE), ranks=8)
    assert found.fields == {
        "batch.global_batch": 32,
        "batch.micro_batch": 4,
        "layout.dp_shard": 8,
        "layout.zero": 3,
        "memory.offload": ["optimizer", "params"],
        "precision.compute": "fp32",
    }
    notes = "\n".join(found.notes)
    for said in (
        "no batch size is given: batch.micro_batch = 4",
        "optimizer.clip is not given and keeps its default here, 1.0",
        "the file sets no optimizer",
        "the file sets no scheduler",
        "neither bf16 nor fp16",
        "model, data, batch.sequence_length, run.steps are not in the file",
    ):
        assert said in notes
    assert require_layout(found.job, 8) is None
    alone = deepspeed(tmp_path, json.loads(LECTURE))
    assert (alone.job.batch.global_batch, alone.job.layout.dp_shard) == (16, 1)
    assert any("--ranks" in note for note in alone.notes)


def test_auto_counts_as_not_given_and_is_said(tmp_path: Path) -> None:
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto", "warmup_type": "linear"},
        },
    }
    found = deepspeed(tmp_path, auto, ranks=4)
    ours, usual = found.job, Job()
    assert (ours.optimizer, ours.batch) == (usual.optimizer, usual.batch)
    assert ours.schedule.warmup_steps is None and ours.schedule.name == "constant"
    said = next(note for note in found.notes if note.startswith('"auto"'))
    assert said.endswith("scheduler.params.warmup_num_steps, scheduler.params.warmup_max_lr")
    assert "gradient_clipping" in said and "optimizer.params.lr" in said


def test_ranks_that_nobody_told_are_noted(tmp_path: Path) -> None:
    assert any("--ranks" in note for note in trainer(tmp_path, {}).notes)
    assert not any("--ranks" in note for note in trainer(tmp_path, {}, ranks=1).notes)
    assert not any("--ranks" in note for note in deepspeed(tmp_path, DEEPSPEED).notes)
    untold = {key: value for key, value in DEEPSPEED.items() if key != "train_batch_size"}
    assert any("--ranks" in note for note in deepspeed(tmp_path, untold).notes)


def test_the_trainer_s_defaults_are_its_own_not_ours(tmp_path: Path) -> None:
    found = trainer(tmp_path, {"bf16": True, "gradient_accumulation_steps": 2}, ranks=4)
    assert found.fields == {
        "batch.global_batch": 64,
        "batch.micro_batch": 8,
        "layout.dp_replicate": 4,
        "precision.compute": "bf16",
        "optimizer.name": "adamw",
        "optimizer.lr": 5e-5,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.0,
        "optimizer.clip": 1.0,
        "schedule.name": "wsd",
        "schedule.warmup_steps": 0,
        "schedule.decay_steps": 100,
        "schedule.min_lr_ratio": 0.0,
        "evaluation.every_steps": 0,
        "checkpoint.every_steps": 500,
        "checkpoint.keep_every": 500,
        "run.steps": 100,
        "run.folder": "runs/x",
        "run.seed": 42,
        "log.every_steps": 500,
    }


def test_every_argument_of_the_installed_transformers_is_known(tmp_path: Path) -> None:
    values = arguments_of_transformers()
    assert trainer(tmp_path, values | {"output_dir": "x", "max_steps": 7}).job.run.steps == 7
    for name in values.keys() & RULES.keys():  # and no value that means something is passed over in silence
        rule, other = RULES[name], "zzz"
        if hasattr(rule, "passes") and not rule.passes(other):
            with pytest.raises(UserError, match=f'{name} = "zzz" has no counterpart here'):
                trainer(tmp_path, {name: other})


def test_no_argument_of_the_installed_transformers_is_passed_over(tmp_path: Path) -> None:
    """Whatever its value: an argument that a new release adds fails here until someone decides what it means."""
    names = arguments_of_transformers()
    assert len(names) > 100
    for name in names:
        try:
            trainer(tmp_path, {name: "zzz"})
        except UserError as error:
            assert "is not a setting known here" not in str(error)
    with pytest.raises(UserError, match=r"brand_new = .* is not a setting known here"):
        trainer(tmp_path, {"brand_new": "zzz"})


RECIPE_1 = """
# Launch with torchrun
torchrun --nproc_per_node=4 train.py \\
--model_name meta-llama/Llama-2-7b-hf \\
--fsdp "shard_grad_op" \\
--bf16 true \\
--gradient_checkpointing true \\
--attn_implementation flash_attention_2
"""


def test_the_lectures_recipe_1_converts_as_it_is_typed(tmp_path: Path) -> None:
    (tmp_path / "recipe.sh").write_text(RECIPE_1)
    found = job_from_hf_trainer(tmp_path / "recipe.sh")
    expected = {
        "model.init_from": "meta-llama/Llama-2-7b-hf", "batch.global_batch": 32, "batch.micro_batch": 8,
        "layout.dp_shard": 4, "layout.zero": 2, "precision.compute": "bf16", "memory.recompute": "full",
    }  # fmt: skip
    assert found.fields.items() >= expected.items()
    notes = "\n".join(found.notes)
    assert "run.steps is not given and keeps its default here, 1000" in notes and "--ranks" not in notes
    assert 'attn_implementation = "flash_attention_2": attention runs on the fastest kernel' in notes
    assert "to be set: data.sources, batch.sequence_length" in notes
    assert '[model]\ninit_from = "meta-llama/Llama-2-7b-hf"\n\n[batch]' in job_text(found.job, "")


def test_arguments_of_a_command_line_are_those_of_the_json(tmp_path: Path) -> None:
    line = "python train.py --max_steps 100 --learning_rate 2e-5 --fsdp full_shard offload --bf16 --max-seq-length 2048"
    (tmp_path / "line.sh").write_text(f"{line} --report_to wandb --max_grad_norm none --use_cpu False")
    settings = {"learning_rate": 2e-5, "fsdp": ["full_shard", "offload"], "bf16": True, "report_to": "wandb"}
    same = trainer(tmp_path, settings | {"max_grad_norm": None, "use_cpu": False, "max_seq_length": 2048}).fields
    assert job_from_hf_trainer(tmp_path / "line.sh").fields == {k: v for k, v in same.items() if k != "run.folder"}
    (tmp_path / "line.sh").write_text("python train.py --max_steps $STEPS --my_flag")
    with pytest.raises(UserError, match=r'max_steps = "\$STEPS" is not a number(.|\n)*my_flag = true is not a setting'):
        job_from_hf_trainer(tmp_path / "line.sh")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"attn_implementation": "sdpa"}, {"layout.dp_replicate": 4}),
        ({"fsdp": "full_shard auto_wrap"}, {"layout.dp_shard": 4, "layout.zero": 3}),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, {"layout.zero": 2}),
        ({"fsdp": ["full_shard", "offload"]}, {"memory.offload": ["params"]}),
        ({"gradient_checkpointing": True}, {"memory.recompute": "full"}),
        ({"warmup_steps": 0.05}, {"schedule.warmup_steps": 5, "schedule.decay_steps": 95}),
        (
            {"lr_scheduler_type": "cosine", "warmup_ratio": 0.03},
            {"schedule.name": "cosine", "schedule.warmup_steps": 3},
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            {"schedule.min_lr_ratio": 0.1},
        ),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 9},
            {"schedule.name": "constant", "schedule.warmup_steps": 0},
        ),
        ({"save_total_limit": 3, "save_steps": 50}, {"checkpoint.every_steps": 50, "checkpoint.keep_last": 3}),
        ({"eval_strategy": "steps", "eval_steps": 20}, {"evaluation.every_steps": 20}),
        ({"report_to": ["wandb"]}, {"log.sinks": ["wandb"]}),
        ({"max_grad_norm": None}, {"optimizer.clip": 0.0}),
        ({"tf32": True, "use_cpu": True}, {"precision.compute": "tf32", "run.device": "cpu"}),
    ],
)
def test_arguments_with_a_counterpart(tmp_path: Path, change: Settings, expected: Settings) -> None:
    assert trainer(tmp_path, change, ranks=4).fields.items() >= expected.items()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_steps": -1}, "max_steps = -1 leaves the length to the number of epochs; write the number of steps"),
        ({"optim": "adafactor"}, 'optim = "adafactor" has no counterpart here'),
        ({"lr_scheduler_type": "polynomial"}, 'lr_scheduler_type = "polynomial" has no counterpart here'),
        ({"lr_scheduler_type": "warmup_stable_decay"}, 'lr_scheduler_type = "warmup_stable_decay" has no counterpart'),
        ({"save_strategy": "epoch"}, 'save_strategy = "epoch" has no counterpart here'),
        ({"fsdp": "hybrid_shard"}, "hybrid_shard needs its two degrees"),
        ({"deepspeed": {"a": 1}}, "convert that file with meshwright job from-deepspeed"),
        ({"group_by_length": True}, "group_by_length = true has no counterpart here; data.packing"),
        ({"data_seed": 7}, "data_seed = 7 has no counterpart here"),
        ({"learning_rate": "fast"}, 'learning_rate = "fast" is not a valid value for optimizer.lr'),
        ({"my_own": 1}, "my_own = 1 is not a setting known here"),
        (
            {"eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 3},
            "per_device_eval_batch_size = 3 has",
        ),
    ],
)
def test_arguments_without_one_are_refused_by_name(tmp_path: Path, change: Settings, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        trainer(tmp_path, change)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


FULL_DEEPSPEED: Settings = DEEPSPEED | {
    "fp16": {"enabled": False, "loss_scale": 0},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 50, "warmup_num_steps": 5, "warmup_type": "linear", "cos_min_ratio": 0.1},
    },
    "tensor_parallel": {"autotp_size": 1},
    "data_types": {"grad_accum_dtype": "fp32"},
    "steps_per_print": 10,
    "wandb": {"enabled": False},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "ratio": 1},
        "offload_param": {"device": "cpu"},
    },
}
FULL_ARGUMENTS: Settings = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-4, "weight_decay": 0.1,
    "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "optim": "adamw_torch",
    "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 3,
    "warmup_ratio": 0.0, "bf16": True, "fp16": False, "tf32": None, "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False}, "accelerator_config": {"split_batches": False},
    "fsdp": "full_shard", "fsdp_config": {"min_num_params": 0}, "save_strategy": "steps", "save_steps": 5,
    "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 8,
    "logging_strategy": "steps", "logging_steps": 5, "report_to": [], "run_name": None, "seed": 1, "data_seed": None,
    "use_cpu": True, "max_steps": 100, "output_dir": "x",
}  # fmt: skip


def changed_leaves(settings: Settings) -> Iterator[Settings]:
    """The settings with one value at a time replaced by things it cannot be."""
    for name, value in settings.items():
        others: list[Any] = [[], "zzz", -1, 0, None, {"a": 1}, True, 1.5, 10**4000, math.inf, math.nan, 1e300, "\0"]
        yield from ({**settings, name: other} for other in others)
        if isinstance(value, dict):
            yield from ({**settings, name: inner} for inner in changed_leaves(value))


@pytest.mark.parametrize(("convert", "settings"), [(deepspeed, FULL_DEEPSPEED), (trainer, FULL_ARGUMENTS)])
def test_no_value_whatever_is_more_than_a_mistake(
    tmp_path: Path, convert: Callable[..., Converted], settings: Settings
) -> None:
    assert convert(tmp_path, settings, 8 if convert is deepspeed else 2).fields
    for changed in changed_leaves(settings):
        try:
            convert(tmp_path, changed, None)
        except UserError as error:
            assert ".json: " in str(error)


def test_the_linear_schedule_is_the_trainer_s_but_for_one_step(tmp_path: Path) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    from meshwright.train.schedule import learning_rate

    for kind, function in (("linear", "linear_schedule"), ("cosine", "cosine_schedule")):
        job = trainer(tmp_path, {"lr_scheduler_type": kind, "warmup_steps": 10}).job
        settings: dict[str, float] = {"num_warmup_steps": 10, "num_training_steps": 100}
        if kind == "cosine":
            settings["num_cycles"] = 0.5
        theirs = getattr(optimization, f"_get_{function}_with_warmup_lr_lambda")
        for step in (1, 5, 10, 11, 60, 100):
            assert learning_rate(job, step) == pytest.approx(5e-5 * theirs(step, **settings), abs=1e-12)


def test_all_refusals_come_at_once_and_nothing_is_written(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED | {"amp": {"enabled": True}, "sparse_gradients": True}))
    done = cli("job", "from-deepspeed", "ds.json", "--out", "job.toml")
    assert done.code == 2 and not (tmp_path / "job.toml").exists()
    names = ("amp.enabled", "sparse_gradients")
    assert len(done.err.splitlines()) == 2 and all(f"ds.json: {name} = true" in done.err for name in names)


def test_the_commands_write_a_job_and_speak_json(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    assert cli("job", "from-deepspeed", "ds.json", "--out", "job.toml").code == 0
    assert load_job("job.toml").job.layout.dp_shard == 8
    (tmp_path / "args.json").write_text(json.dumps({"output_dir": "x", "max_steps": 5}))
    done = cli("job", "from-hf-trainer", "args.json", "--json")
    told = json.loads(done.out)
    assert set(told) == {"fields", "notes", "job", "written"} and told["fields"]["run.steps"] == 5
    for text, sentence in (("[1]", "instead of a table"), ("{", "cannot be read as JSON")):
        (tmp_path / "args.json").write_text(text)
        done = cli("job", "from-hf-trainer", "args.json")
        assert done.code == 2 and sentence in done.err


def test_one_sentence_is_said_of_a_setting(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": "lots"}', encoding="utf-8")
    refused = cli("job", "from-deepspeed", "ds.json")
    assert refused.code == 2 and refused.err.count("train_micro_batch_size_per_gpu =") == 1
