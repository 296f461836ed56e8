"""The Trainer's arguments with its DeepSpeed configuration: "auto" is resolved and mismatches refused as it does."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conversions import Settings, changed_leaves, refused, trainer

from meshwright.errors import UserError
from meshwright.job import Converted, job_from_hf_trainer, job_text, load_job

AUTO: Settings = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 5e8,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
"""What people usually write: everything that the Trainer knows is left to it."""
ARGUMENTS: Settings = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 2e-5, "weight_decay": 0.01,
    "adam_beta2": 0.95, "warmup_ratio": 0.1, "max_steps": 50, "bf16": True, "gradient_checkpointing": True,
}  # fmt: skip


def both(folder: Path, arguments: Settings, configuration: Settings, ranks: int = 4, **more: Any) -> Converted:
    (folder / "ds.json").write_text(json.dumps(configuration))
    return trainer(folder, arguments, ranks, deepspeed=folder / "ds.json", **more)


def test_the_usual_configuration_converts(tmp_path: Path) -> None:
    found = both(tmp_path, ARGUMENTS, AUTO)
    assert found.fields == {
        "batch.global_batch": 32,
        "batch.micro_batch": 4,
        "layout.dp_shard": 4,
        "layout.zero": 3,
        "memory.recompute": "full",
        "memory.offload": ["optimizer", "params"],
        "precision.compute": "bf16",
        "optimizer.name": "adamw",
        "optimizer.lr": 2e-5,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.01,
        "optimizer.clip": 1.0,
        "schedule.name": "wsd",
        "schedule.warmup_steps": 5,
        "schedule.decay_steps": 45,
        "schedule.min_lr_ratio": 0.0,
        "evaluation.every_steps": 0,
        "checkpoint.every_steps": 500,
        "checkpoint.keep_every": 500,
        "run.steps": 50,
        "run.folder": "runs/x",
        "run.seed": 42,
        "log.every_steps": 500,
    }
    path = tmp_path / "job.toml"
    path.write_text(job_text(found.job, "from a test"))
    assert load_job(str(path)).job == found.job
    resolved = next(note for note in found.notes if note.startswith('"auto"'))
    assert "optimizer.params.lr" in resolved and "scheduler.params.total_num_steps" in resolved
    listed = next(note for note in found.notes if note.startswith("without effect on any number"))
    assert "zero_optimization.reduce_bucket_size" in listed and "steps_per_print" in listed
    assert not any("autocasts" in note or "keeps its default" in note for note in found.notes)


def by_transformers(configuration: Settings, arguments: Settings, ranks: int) -> tuple[Settings, list[str]]:
    """The configuration as the installed Trainer resolves it, and the mismatches that it finds."""
    base: Any = pytest.importorskip("transformers.integrations.deepspeed").HfTrainerDeepSpeedConfig

    class Resolved(base):
        """With what Accelerate's class, which may be missing here, looks up in the configuration."""

        def __init__(self) -> None:
            self.config, self.mismatches, self._dtype = copy.deepcopy(configuration), [], None

        def find_config_node(self, name: str) -> tuple[Settings | None, str]:
            *sections, key = name.split(".")
            node: Settings | None = self.config
            for section in sections:
                node = node.get(section) if node is not None else None
            return node, key

        def get_value(self, name: str, default: Any = None) -> Any:
            node, key = self.find_config_node(name)
            return default if node is None else node.get(key, default)

        def is_true(self, name: str) -> bool:
            return bool(self.get_value(name))

        def is_zero3(self) -> bool:
            return self.get_value("zero_optimization.stage") == 3

    usual = {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "learning_rate": 5e-5,
        "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0, "save_on_each_node": False,
        "fp16": False, "bf16": False, "fp16_full_eval": False, "bf16_full_eval": False, "world_size": ranks,
    }  # fmt: skip
    given = usual | arguments
    ratio = arguments.get("warmup_ratio", 0)
    theirs = Resolved()
    asked = SimpleNamespace(**given, get_warmup_steps=lambda steps: math.ceil(steps * ratio))
    theirs.trainer_config_process(asked)
    try:
        model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
        theirs.trainer_config_finalize(asked, model, arguments["max_steps"])
    except ValueError as error:
        assert theirs.mismatches and "mismatch" in str(error)
    return theirs.config, theirs.mismatches


def test_auto_is_what_the_installed_trainer_makes_of_it(tmp_path: Path) -> None:
    for change in ({}, {"warmup_ratio": 0.0}, {"adam_beta1": 0.8, "max_grad_norm": 0.3, "adam_epsilon": 1e-6}):
        arguments = ARGUMENTS | change
        theirs, mismatches = by_transformers(AUTO, arguments, 4)
        fields = both(tmp_path, arguments, AUTO).fields
        assert mismatches == []
        optimizer, scheduler = theirs["optimizer"]["params"], theirs["scheduler"]["params"]
        assert fields["batch.global_batch"] == theirs["train_batch_size"]
        assert fields["batch.micro_batch"] == theirs["train_micro_batch_size_per_gpu"]
        assert fields["optimizer.clip"] == theirs["gradient_clipping"]
        assert {name: fields[f"optimizer.{name}"] for name in optimizer} == optimizer
        assert fields["run.steps"] == scheduler["total_num_steps"]
        assert fields["schedule.warmup_steps"] == scheduler["warmup_num_steps"]
        assert (fields["precision.compute"] == "bf16") == theirs["bf16"]["enabled"]


@pytest.mark.parametrize(
    ("arguments", "configuration", "expected"),
    [
        ({"deepspeed": "ds.json"}, {}, {"layout.zero": 3}),
        # without these sections the Trainer's own optimizer and schedule run, under DeepSpeed
        ({"lr_scheduler_type": "cosine"}, {"scheduler": None}, {"schedule.name": "cosine", "schedule.warmup_steps": 5}),
        ({}, {"optimizer": None}, {"optimizer.lr": 2e-5, "optimizer.weight_decay": 0.01}),
        ({"fp16": True, "bf16": False}, {}, {"precision.compute": "fp16"}),
        ({"tf32": True, "bf16": False}, {}, {"precision.compute": "tf32"}),
        ({}, {"bf16": None, "fp16": None}, {"precision.compute": "bf16"}),  # Accelerate adds the section
        ({"warmup_ratio": 0}, {}, {"schedule.warmup_steps": 1, "schedule.decay_steps": 49}),
        ({}, {"zero_optimization": {"stage": 2}}, {"layout.zero": 2, "layout.dp_shard": 4}),
        ({"report_to": ["wandb"]}, {"tensorboard": {"enabled": True}}, {"log.sinks": ["wandb", "tensorboard"]}),
        # DeepSpeed's own default, since the file does not ask for the arguments'
        (
            {},
            {"optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.01}}},
            {"optimizer.betas": [0.9, 0.999]},
        ),
        (
            {"max_steps": -1, "num_train_epochs": 2},
            {},
            {"run.steps": 8, "schedule.warmup_steps": 1, "schedule.decay_steps": 7},
        ),
    ],
)
def test_what_both_files_say_together(
    tmp_path: Path, arguments: Settings, configuration: Settings, expected: Settings
) -> None:
    settings = {name: value for name, value in (AUTO | configuration).items() if value is not None}
    found = both(tmp_path, ARGUMENTS | arguments, settings, examples=128)
    assert found.fields.items() >= expected.items()


@pytest.mark.parametrize(
    ("configuration", "sentence"),
    [
        (
            {"train_micro_batch_size_per_gpu": 8},
            "train_micro_batch_size_per_gpu = 8 is not per_device_train_batch_size = 4 of ",
        ),
        (
            {"train_batch_size": 64},
            "train_batch_size = 64 is not per_device_train_batch_size × gradient_accumulation_steps × 4 ranks = 32 of ",
        ),
        ({"gradient_clipping": 0.5}, "gradient_clipping = 0.5 is not max_grad_norm = 1 (its default) of "),
        ({"bf16": {"enabled": False}}, "bf16.enabled = false is not bf16 = true of "),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": "auto"}}},
            "optimizer.params.lr = 0.0003 is not learning_rate = 2e-05 of ",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
            'optimizer.params.weight_decay is not given; write "auto" for weight_decay, or its value',
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {**AUTO["scheduler"]["params"], "total_num_steps": 9}}},
            "scheduler.params.total_num_steps = 9 is not the number of steps = 50 of ",
        ),
        ({"zero_optimization": {"stage": "auto"}}, 'stage = "auto" is not resolved by the Trainer; write its value'),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights = true has no"),
        ({"my_own": 1}, "my_own = 1 is not a setting known here"),
    ],
)
def test_values_that_differ_are_refused_in_a_sentence(tmp_path: Path, configuration: Settings, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        both(tmp_path, ARGUMENTS, AUTO | configuration)
    (said,) = refused(caught.value)
    assert said.startswith(f"{tmp_path / 'ds.json'}: ") and sentence in said
    if sentence.endswith(" of "):
        assert said.endswith(f'of {tmp_path / "args.json"}; write one value in both, or "auto" here')
        assert len(by_transformers(AUTO | configuration, ARGUMENTS, 4)[1]) == 1  # the Trainer refuses it, too


def test_the_configuration_is_found_where_the_arguments_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "ds.json").write_text(json.dumps(AUTO))
    path = tmp_path / "settings" / "args.json"
    expected = both(tmp_path, ARGUMENTS, AUTO).fields
    for given in ("ds.json", str(tmp_path / "settings" / "ds.json"), AUTO):
        path.write_text(json.dumps({"output_dir": "runs/x", **ARGUMENTS, "deepspeed": given}))
        assert job_from_hf_trainer(path, 4).fields == expected
    monkeypatch.chdir(tmp_path / "settings")
    (tmp_path / "args.json").write_text(json.dumps({"output_dir": "runs/x", **ARGUMENTS, "deepspeed": "ds.json"}))
    assert job_from_hf_trainer(tmp_path / "args.json", 4).fields == expected  # or where the Trainer was started


def test_the_option_has_the_last_word(tmp_path: Path) -> None:
    found = both(tmp_path, ARGUMENTS | {"deepspeed": "/somewhere/else.json"}, AUTO)
    assert found.job.layout.zero == 3


def test_fsdp_and_a_schedule_that_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='fsdp = "full_shard" contradicts deepspeed; keep one of them'):
        both(tmp_path, ARGUMENTS | {"fsdp": "full_shard"}, AUTO)
    found = both(tmp_path, ARGUMENTS | {"lr_scheduler_type": "polynomial"}, AUTO)
    where = tmp_path / "ds.json"
    assert f"lr_scheduler_type = polynomial: not used, since the scheduler of {where} is" in found.notes


def test_deepspeed_s_launcher_gives_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    line = "deepspeed --num_gpus=8 --num_nodes 2 train.py --deepspeed ds.json --bf16 --max_steps 50"
    (tmp_path / "train.sh").write_text(line)
    found = job_from_hf_trainer(tmp_path / "train.sh")
    assert (found.job.layout.dp_shard, found.job.layout.zero, found.job.batch.global_batch) == (16, 3, 128)


def test_no_value_whatever_is_more_than_a_mistake(tmp_path: Path) -> None:
    for changed in changed_leaves(AUTO):
        try:
            both(tmp_path, ARGUMENTS, changed)
        except UserError as error:
            assert ".json: " in str(error)
    for name in ("\0", "x" * 5000, "/", "args.json"):
        with pytest.raises(UserError):
            trainer(tmp_path, {"deepspeed": name})


def test_one_command_takes_both_files(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    (tmp_path / "args.json").write_text(json.dumps({"num_train_epochs": 1, "per_device_train_batch_size": 2}))
    words = ("job", "from-hf-trainer", "args.json", "--deepspeed", "ds.json", "--ranks", "2")
    refusal = cli(*words)
    assert refusal.code == 2 and len(refusal.err.splitlines()) == 1 and "give --examples" in refusal.err
    done = cli(*words, "--examples", "40", "--out", "job.toml")
    assert done.code == 0 and load_job("job.toml").job.run.steps == 10
    assert (tmp_path / "job.toml").read_text().startswith("# from args.json and ds.json, TrainingArguments\n")
    checked = cli("plan", "--check", "job.toml", "--set", "model.preset=tiny-llama", "--cluster", "2xh100")
    assert checked.code == 0, checked.err
