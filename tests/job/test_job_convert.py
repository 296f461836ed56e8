"""DeepSpeed's and the Hugging Face Trainer's settings become a job, or are refused by name, all of them at once."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.job import Converted, job_from_deepspeed, job_from_hf_trainer, job_text, load_job
from meshwright.job.from_hf_trainer import RULES

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
        ({"gradient_clipping": None}, "gradient_clipping is not given; its default differs between versions"),
        ({"bf16": {"enabled": "yes"}}, 'bf16.enabled = "yes" is neither true nor false; correct it'),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4 is not a stage; write 0, 1, 2 or 3"),
        (
            {"optimizer": {"type": "Lamb", "params": {"lr": 1}}},
            'optimizer.type = "Lamb" has no counterpart here; use Adam',
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1}}},
            "optimizer.params.weight_decay is not given; its default",
        ),
        ({"gradient_clipping": "auto"}, 'gradient_clipping = "auto" leaves the choice to the other program; write the'),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4}}},
            "scheduler.params.warmup_type is not given",
        ),
        (
            {"flops_profiler": {"enabled": True, "x": 1}},
            "flops_profiler.enabled = true has no counterpart here; switch",
        ),
        ({"pipeline": {"stages": 4}}, "pipeline.stages = 4 has no counterpart here"),
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


@pytest.mark.parametrize(
    ("change", "expected"),
    [
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
        ({"my_own": 1}, "my_own = 1 has no counterpart here"),
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
