"""The Hugging Face Trainer's arguments become a job, or are refused by name; epochs become steps."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conversions import Settings, changed_leaves, trainer

from meshwright.errors import UserError
from meshwright.job import job_from_hf_trainer, job_text
from meshwright.job.hf_arguments import RULES


def arguments_of_transformers() -> Settings:
    """Every field of TrainingArguments with its default, under the names the installed version has."""
    transformers = pytest.importorskip("transformers")
    fields = [field for field in dataclasses.fields(transformers.TrainingArguments) if field.init]
    missing = dataclasses.MISSING
    values = {f.name: f.default if f.default is not missing else f.default_factory() for f in fields}
    return json.loads(json.dumps(values, default=str))


def test_ranks_that_nobody_told_are_noted(tmp_path: Path) -> None:
    assert any("--ranks" in note for note in trainer(tmp_path, {}).notes)
    assert not any("--ranks" in note for note in trainer(tmp_path, {}, ranks=1).notes)


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
        ({"activation_checkpointing": True}, {"memory.recompute": "full"}),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
            {"memory.recompute": {"every": 2}},
        ),
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


def test_an_old_name_of_an_argument_counts_where_the_new_one_is_not_given(tmp_path: Path) -> None:
    old = {"gradient_checkpointing": True}
    assert trainer(tmp_path, {**old, "activation_checkpointing": None}).fields["memory.recompute"] == "full"
    assert "memory.recompute" not in trainer(tmp_path, {**old, "activation_checkpointing": False}).fields
    with pytest.raises(
        UserError, match=r"activation_checkpointing_kwargs = .* has no counterpart here; remove offload"
    ):
        trainer(tmp_path, {**old, "activation_checkpointing_kwargs": {"offload": True}})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_steps": -1}, "max_steps = -1 leaves the length to the number of examples; give --examples"),
        (
            {"max_steps": -1, "num_train_epochs": 2},
            "num_train_epochs = 2 leaves the length to the number of examples; give --examples (the Trainer logs it",
        ),
        ({"optim": "adafactor"}, 'optim = "adafactor" has no counterpart here'),
        ({"lr_scheduler_type": "polynomial"}, 'lr_scheduler_type = "polynomial" has no counterpart here'),
        ({"lr_scheduler_type": "warmup_stable_decay"}, 'lr_scheduler_type = "warmup_stable_decay" has no counterpart'),
        ({"save_strategy": "epoch"}, 'save_strategy = "epoch" depends on the number of examples; give --examples'),
        ({"save_strategy": "best"}, 'save_strategy = "best" has no counterpart here'),
        ({"fsdp": "hybrid_shard"}, "hybrid_shard needs its two degrees"),
        (
            {"deepspeed": "gone.json"},
            'deepspeed = "gone.json" is not a file next to the arguments or here',
        ),
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


@pytest.mark.parametrize(
    ("examples", "epochs", "drop", "steps"),
    [
        (1000, 3, False, 96),  # 63 batches of 16, which are 32 updates of two
        (1000, 2.5, False, 80),
        (1000, 3, True, 93),  # 62 batches
        (5, 3, False, 3),
        (5, 3, True, 3),
        (1024, 1, False, 32),
    ],
)
def test_epochs_become_the_trainer_s_steps(
    tmp_path: Path, examples: int, epochs: float, drop: bool, steps: int
) -> None:
    settings: Settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    settings |= {"max_steps": -1, "num_train_epochs": epochs, "warmup_ratio": 0.1, "dataloader_drop_last": drop}
    found = trainer(tmp_path, settings, ranks=2, examples=examples)
    assert found.job.run.steps == steps and found.job.schedule.warmup_steps == -(-steps // 10)
    assert found.job.schedule.decay_steps == steps - -(-steps // 10)
    assert any(note.startswith(f"{epochs:g} epochs of {examples} examples are {steps} steps") for note in found.notes)
    given = trainer(tmp_path, settings | {"max_steps": 7}, ranks=2, examples=examples)
    assert given.job.run.steps == 7  # which take precedence


def test_the_trainer_counts_epochs_like_this(tmp_path: Path) -> None:
    """Its own arithmetic, asked in the installed package."""
    module = pytest.importorskip("transformers.trainer")
    if not hasattr(module.Trainer, "set_initial_training_values"):
        pytest.skip("counts elsewhere in this release")
    for examples, epochs, accumulation in ((1000, 3, 2), (17, 1.5, 4), (3, 2, 8), (4096, 1, 1)):
        arguments = SimpleNamespace(max_steps=-1, num_train_epochs=epochs, gradient_accumulation_steps=accumulation)
        loader = range(-(-examples // 8))
        asked = SimpleNamespace(
            get_total_train_batch_size=lambda args: 8 * args.gradient_accumulation_steps,
            get_sp_size=lambda: 1,
            num_examples=lambda _, examples=examples: examples,
        )
        theirs = module.Trainer.set_initial_training_values(asked, arguments, loader)[-1]
        settings = {"max_steps": -1, "num_train_epochs": epochs, "gradient_accumulation_steps": accumulation}
        assert trainer(tmp_path, settings, ranks=1, examples=examples).job.run.steps == theirs


def test_what_happens_every_epoch(tmp_path: Path) -> None:
    each = {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_strategy": "epoch"}
    settings = each | {"max_steps": -1, "num_train_epochs": 3, "save_total_limit": 2}
    job = trainer(tmp_path, settings, ranks=4, examples=1000).job
    assert job.run.steps == 96  # of 32 each
    assert (job.checkpoint.every_steps, job.evaluation.every_steps, job.log.every_steps) == (32, 32, 32)
    assert trainer(tmp_path, {"logging_strategy": "no", "save_strategy": "no"}).job.log.every_steps == 0


def test_a_length_beyond_our_default_model_s_waits_for_the_model(tmp_path: Path) -> None:
    for model in ({}, {"model_name_or_path": "org/name"}):
        found = trainer(tmp_path, {"max_seq_length": 8192, **model})
        assert found.job.batch.sequence_length == 8192
        section = '[model]\ninit_from = "org/name"\n' if model else ""
        assert job_text(found.job, "").startswith(f"\n{section}\n[batch]" if model else "\n[batch]")


def test_what_changes_no_number_is_ignored_and_listed(tmp_path: Path) -> None:
    settings = {"ddp_timeout": 18000, "use_liger_kernel": True, "ddp_find_unused_parameters": False}
    found = trainer(tmp_path, settings, ranks=1)
    assert found.job == trainer(tmp_path, {}, ranks=1).job
    assert "without effect on any number, and ignored: ddp_timeout, use_liger_kernel" in found.notes


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


def test_no_value_whatever_is_more_than_a_mistake(tmp_path: Path) -> None:
    assert trainer(tmp_path, FULL_ARGUMENTS, 2).fields
    for changed in changed_leaves(FULL_ARGUMENTS):
        try:
            trainer(tmp_path, changed)
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


def test_the_command_speaks_json(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(json.dumps({"output_dir": "x", "max_steps": 5}))
    done = cli("job", "from-hf-trainer", "args.json", "--json")
    told = json.loads(done.out)
    assert set(told) == {"fields", "notes", "job", "written"} and told["fields"]["run.steps"] == 5
    for text, sentence in (("[1]", "instead of a table"), ("{", "cannot be read as JSON")):
        (tmp_path / "args.json").write_text(text)
        done = cli("job", "from-hf-trainer", "args.json")
        assert done.code == 2 and sentence in done.err
