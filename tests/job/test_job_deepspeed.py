"""DeepSpeed's settings become a job, or are refused by name, all of them at once."""

import json
from pathlib import Path
from typing import Any

import pytest
from conversions import Settings, changed_leaves, deepspeed

from meshwright.errors import UserError
from meshwright.job import Job, job_text, load_job
from meshwright.layout import require_layout

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
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4, "warmup_type": "log"}}},
            'scheduler.params.warmup_type = "log" has no counterpart here; the warm-up is linear here',
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


def test_what_changes_no_number_is_ignored_and_listed(tmp_path: Path) -> None:
    moves = {"stage": 3, "reduce_bucket_size": 2e8, "stage3_prefetch_bucket_size": 1, "overlap_comm": False}
    found = deepspeed(tmp_path, DEEPSPEED | {"zero_optimization": moves, "wall_clock_breakdown": True})
    assert found.job == deepspeed(tmp_path, DEEPSPEED).job
    listed = next(note for note in found.notes if note.startswith("without effect on any number"))
    names = ("zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size")
    assert listed.endswith(f"ignored: {', '.join(names)}, wall_clock_breakdown")


def test_a_warm_up_of_unsaid_form_is_linear_and_said(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 9}}
    found = deepspeed(tmp_path, DEEPSPEED | {"scheduler": scheduler})
    assert (found.job.schedule.name, found.job.schedule.warmup_steps) == ("constant", 9)
    assert "the warm-up is linear here; without a warmup_type DeepSpeed's is logarithmic" in found.notes


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
    assert not any("--ranks" in note for note in deepspeed(tmp_path, DEEPSPEED).notes)
    untold = {key: value for key, value in DEEPSPEED.items() if key != "train_batch_size"}
    assert any("--ranks" in note for note in deepspeed(tmp_path, untold).notes)


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


def test_no_value_whatever_is_more_than_a_mistake(tmp_path: Path) -> None:
    assert deepspeed(tmp_path, FULL_DEEPSPEED, 8).fields
    for changed in changed_leaves(FULL_DEEPSPEED):
        try:
            deepspeed(tmp_path, changed)
        except UserError as error:
            assert ".json: " in str(error)


def test_all_refusals_come_at_once_and_nothing_is_written(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED | {"amp": {"enabled": True}, "sparse_gradients": True}))
    done = cli("job", "from-deepspeed", "ds.json", "--out", "job.toml")
    assert done.code == 2 and not (tmp_path / "job.toml").exists()
    names = ("amp.enabled", "sparse_gradients")
    assert len(done.err.splitlines()) == 2 and all(f"ds.json: {name} = true" in done.err for name in names)


def test_the_command_writes_a_job(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    assert cli("job", "from-deepspeed", "ds.json", "--out", "job.toml").code == 0
    assert load_job("job.toml").job.layout.dp_shard == 8


def test_one_sentence_is_said_of_a_setting(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": "lots"}', encoding="utf-8")
    refused = cli("job", "from-deepspeed", "ds.json")
    assert refused.code == 2 and refused.err.count("train_micro_batch_size_per_gpu =") == 1
