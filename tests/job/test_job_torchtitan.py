"""Torchtitan's TOML becomes a job, or its settings are refused by name."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conversions import Settings, changed_leaves, refused

from meshwright.errors import UserError
from meshwright.job import Converted, job_from_torchtitan, job_text, load_job
from meshwright.job.text import table_text
from meshwright.job.torchtitan_settings import MODELS

EIGHT = """
[job]
dump_folder = "runs/titan"
description = "eight billion"

[profiling]
enable_profiling = true
profile_freq = 100

[metrics]
log_freq = 5
enable_tensorboard = true

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "assets/Llama-3.1-8B"

[optimizer]
name = "AdamW"
lr = 3e-4

[lr_scheduler]
warmup_steps = 200

[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
dataset = "c4"

[parallelism]
data_parallel_shard_degree = -1

[checkpoint]
enable = true
interval = 250

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true

[validation]
enable = true
freq = 500
steps = 16
local_batch_size = 2
seq_len = 8192
"""


def titan(folder: Path, text: str | Settings, gpus: int | None = None) -> Converted:
    written = text if isinstance(text, str) else table_text(text, "")
    (folder / "titan.toml").write_text(written)
    return job_from_torchtitan(folder / "titan.toml", gpus)


def test_a_configuration_becomes_a_job(tmp_path: Path) -> None:
    found = titan(tmp_path, EIGHT, 8)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_sequence_length": 8192}
    assert found.fields == {
        "model.preset": "llama-3-8b",
        "model.embed_std": 1.0,
        "model.max_sequence_length": 131072,
        "model.rope_scaling": scaling,
        "data.tokenizer": "assets/Llama-3.1-8B/tokenizer.json",
        "batch.sequence_length": 8192,
        "batch.global_batch": 8,
        "batch.micro_batch": 1,
        "layout.dp_shard": 8,
        "layout.zero": 3,
        "memory.recompute": "selective",
        "precision.compute": "bf16",
        "precision.gradients": "fp32",
        "optimizer.name": "adamw",
        "optimizer.lr": 3e-4,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.1,
        "optimizer.clip": 1.0,
        "schedule.name": "wsd",
        "schedule.warmup_steps": 200,
        "schedule.decay_steps": 800,
        "schedule.min_lr_ratio": 0.0,
        "evaluation.every_steps": 500,
        "evaluation.batches": 32,
        "checkpoint.every_steps": 250,
        "checkpoint.keep_last": 10,
        "run.steps": 1000,
        "run.folder": "runs/titan",
        "run.compile": True,
        "log.every_steps": 5,
        "log.sinks": ["tensorboard"],
    }
    path = tmp_path / "job.toml"
    path.write_text(job_text(found.job, "from a test"))
    loaded = load_job(str(path)).job
    assert (loaded.model.width, loaded.model.rope_scaling) == (4096, found.job.model.rope_scaling)
    assert loaded == found.job


def test_asynchronous_tensor_parallelism_needs_what_it_needs_there(tmp_path: Path) -> None:
    asked = "[parallelism]\ntensor_parallel_degree = {}\nenable_async_tensor_parallel = true\n{}"
    found = titan(tmp_path, asked.format(2, "[compile]\nenable = true\n"), 2)
    assert found.fields["layout.async_tp"] is True and found.fields["run.compile"] is True
    assert "layout.async_tp" not in titan(tmp_path, asked.format(1, ""), 1).fields
    with pytest.raises(UserError, match=r"enable_async_tensor_parallel .*needs compiled blocks; set compile\.enable"):
        titan(tmp_path, asked.format(2, ""), 2)
    narrow = '[compile]\nenable = true\n[model]\nconverters = ["quantize.linear.float8"]\n'
    found = titan(tmp_path, asked.format(2, narrow), 2)
    assert "layout.async_tp" not in found.fields
    assert any("enable_async_tensor_parallel is left out" in note for note in found.notes)


def test_defaults_are_its_own(tmp_path: Path) -> None:
    found = titan(tmp_path, "", 1)
    expected = {
        "model.width": 256, "batch.micro_batch": 8, "batch.sequence_length": 2048, "precision.compute": "bf16",
        "memory.recompute": {"every": 2}, "optimizer.lr": 8e-4, "schedule.warmup_steps": 200, "run.steps": 10000,
        "evaluation.every_steps": 0, "log.every_steps": 10,
    }  # fmt: skip
    assert found.fields.items() >= expected.items()
    assert not any(name.startswith(("checkpoint.", "layout.")) for name in found.fields)


@pytest.mark.parametrize(
    ("change", "gpus", "expected"),
    [
        ({"parallelism": {"tensor_parallel_degree": 2}}, 8, {"layout.tp": 2, "layout.dp_shard": 4, "layout.zero": 3}),
        (
            {"parallelism": {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1}},
            None,
            {"layout.dp_replicate": 4, "batch.global_batch": 32},
        ),
        (
            {"parallelism": {"context_parallel_degree": 4, "context_parallel_rotate_method": "alltoall"}},
            4,
            {"layout.cp": 4, "layout.cp_method": "ring", "layout.zero": 3, "batch.global_batch": 8},
        ),
        (
            {
                "parallelism": {
                    "pipeline_parallel_degree": 2,
                    "pipeline_parallel_schedule": "Interleaved1F1B",
                    "pipeline_parallel_layers_per_stage": 2,
                    "pipeline_parallel_microbatch_size": 2,
                }
            },
            4,
            # the default keeps parameters between the micro-batches of a pipeline
            {"layout.pp": 2, "layout.schedule": "interleaved", "layout.virtual_stages": 2, "layout.zero": 2}
            | {"batch.micro_batch": 2, "batch.global_batch": 16},
        ),
        (
            {
                "parallelism": {
                    "pipeline_parallel_degree": 2,
                    "module_fqns_per_model_part": [
                        ["tok_embeddings", "layers.0", "layers.1"],
                        ["layers.2", "layers.3", "layers.4", "layers.5", "norm", "output"],
                    ],
                }
            },
            2,
            {"layout.split": [2, 4], "layout.schedule": "1f1b"},
        ),
        ({"parallelism": {"fsdp_reshard_after_forward": "never"}}, 2, {"layout.zero": 2}),
        (
            {"model": {"name": "qwen3", "flavor": "0.6B"}},
            1,
            {"model.preset": "qwen3-0.6b", "model.embed_std": 1024**-0.5},
        ),
        ({"model": {"flavor": "debugmodel_flex_attn"}}, 1, {"model.layers": 6, "data.mask_documents": True}),
        ({"model": {"converters": ["quantize.linear.float8"]}}, 1, {"precision.fp8_head": True}),
        (
            {
                "model": {"converters": ["quantize.linear.float8"]},
                "quantize": {"linear": {"float8": {"recipe_name": "rowwise"}}},
            },
            1,
            {"precision.compute": "fp8", "precision.fp8_scales": "row"},
        ),
        (
            {
                "model": {"converters": ["quantize.linear.float8"]},
                "quantize": {"linear": {"float8": {"enable_fsdp_float8_all_gather": True}}},
            },
            2,
            {"precision.compute": "fp8", "precision.fp8_gather": True},
        ),
        ({"training": {"enable_cpu_offload": True, "max_norm": 2}}, 1, {"memory.offload": ["params"]}),
        ({"training": {"dataset_path": "texts", "global_batch_size": 64}}, 2, {"data.sources": ["texts"]}),
        ({"activation_checkpoint": {"mode": "full"}}, 1, {"memory.recompute": "full"}),
        ({"debug": {"seed": 7, "deterministic": True}}, 1, {"run.seed": 7, "run.deterministic": True}),
        (
            {"lr_scheduler": {"decay_type": "cosine", "min_lr_factor": 0.1}},
            1,
            {"schedule.name": "cosine", "schedule.min_lr_ratio": 0.1},
        ),
        ({"lr_scheduler": {"decay_ratio": 0.25}}, 1, {"schedule.name": "wsd", "schedule.decay_steps": 2500}),
        (
            {"checkpoint": {"enable": True, "initial_load_in_hf": True, "initial_load_path": "hf"}},
            1,
            {"model.init_from": "hf"},
        ),
        (
            {"checkpoint": {"enable": True, "keep_latest_k": 0}},
            1,
            {"checkpoint.every_steps": 500, "checkpoint.keep_every": 500},
        ),
    ],
)
def test_settings_with_a_counterpart(tmp_path: Path, change: Settings, gpus: int | None, expected: Settings) -> None:
    assert titan(tmp_path, change, gpus).fields.items() >= expected.items()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"parallelism": {"data_parallel_shard_degree": 3}}, "= 3 does not fit: the degrees make 3 ranks for 8 GPUs"),
        ({"model": {"name": "deepseek_v3", "flavor": "16B"}}, 'model.name = "deepseek_v3" is not a model known here'),
        ({"model": {"flavor": "9B"}}, 'model.flavor = "9B" is not a model known here; use one of debugmodel, 8B, 70B'),
        ({"model": {"converters": ["quantize.linear.mx"]}}, "use quantize.linear.float8 alone, or none"),
        ({"training": {"dtype": "bfloat16"}}, 'training.dtype = "bfloat16" has no counterpart here'),
        ({"training": {"batch_size": 2}}, "training.batch_size = 2 is not a setting known here"),
        ({"optimizer": {"name": "Muon"}}, 'optimizer.name = "Muon" has no counterpart here; use AdamW'),
        ({"optimizer": {"name": "Adam"}}, 'optimizer.name = "Adam" has no counterpart here'),
        ({"lr_scheduler": {"decay_type": "sqrt"}}, 'lr_scheduler.decay_type = "sqrt" has no counterpart here'),
        ({"lr_scheduler": {"decay_type": "cosine", "decay_ratio": 0.1}}, "a cosine begins after the warm-up here"),
        ({"lr_scheduler": {"total_steps": 99}}, "lr_scheduler.total_steps = 99 has no counterpart here"),
        ({"activation_checkpoint": {"mode": "memory_budget"}}, "budget_gib"),
        ({"fault_tolerance": {"enable": True, "group_size": 2}}, "fault_tolerance.enable = true has no counterpart"),
        ({"checkpoint": {"enable": True, "initial_load_path": "dcp"}}, "not read: save a Hugging Face folder"),
        ({"checkpoint": {"enable": True, "initial_load_in_hf": True}}, "initial_load_in_hf = true names no folder"),
        (
            {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "LoopedBFS"}},
            'pipeline_parallel_schedule = "LoopedBFS" has no counterpart here; use one of 1F1B',
        ),
        ({"experimental": {"custom_import": "my.package"}}, 'experimental.custom_import = "my.package" has no'),
    ],
)
def test_settings_without_one_are_refused_by_name(tmp_path: Path, change: Settings, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        titan(tmp_path, change, 8)
    (said,) = refused(caught.value)
    assert sentence in said


def test_gpus_that_nobody_counted_are_asked_for(tmp_path: Path) -> None:
    for text in (EIGHT, ""):
        with pytest.raises(
            UserError, match="data_parallel_shard_degree = -1 takes all GPUs that are left; give --gpus"
        ):
            titan(tmp_path, text)


@pytest.mark.parametrize(("kind", "ratio"), [("linear", None), ("linear", 0.3), ("cosine", None)])
def test_rates_are_torchtitan_s_but_for_one_step_of_the_decay(tmp_path: Path, kind: str, ratio: float | None) -> None:
    from meshwright.train.schedule import learning_rate

    steps, warmup, floor = 100, 10, 0.1
    decay = 90 if ratio is None else 30
    scheduler = {"warmup_steps": warmup, "decay_type": kind, "min_lr_factor": floor}
    scheduler |= {} if ratio is None else {"decay_ratio": ratio}
    job = titan(tmp_path, {"training": {"steps": steps}, "lr_scheduler": scheduler}, 1).job

    def theirs(step: int) -> float:
        """Their factor of a step: a step more is counted, so that the last one is above the floor."""
        if step <= warmup:
            return step / warmup
        progress = max(0, step - (steps + 1 - decay)) / decay
        left = 1 - progress if kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return floor + (1 - floor) * left

    for step in range(1, steps):
        later = step + 1 if step > steps - decay else step
        assert learning_rate(job, step) == pytest.approx(8e-4 * theirs(later), rel=1e-12)


@pytest.mark.parametrize("model", MODELS, ids=":".join)
def test_every_model_loads(tmp_path: Path, model: tuple[str, str]) -> None:
    name, flavor = model
    text = job_text(titan(tmp_path, {"model": {"name": name, "flavor": flavor}}, 1).job, "")
    (tmp_path / "job.toml").write_text(text)
    assert load_job(str(tmp_path / "job.toml")).job.model.layers >= 6


def test_no_value_whatever_is_more_than_a_mistake(tmp_path: Path) -> None:
    known: Settings = tomllib.loads(EIGHT)
    known["parallelism"] = {"pipeline_parallel_degree": 2, "pipeline_parallel_layers_per_stage": 17}
    known["model"] = {"flavor": "8B", "converters": ["quantize.linear.float8"]}
    changed = [{**known, name: inner} for name, section in known.items() for inner in changed_leaves(section)]
    for table in [*changed, *(f"{name} = 1" for name in known)]:
        try:
            titan(tmp_path, table, 8)
        except UserError as error:
            assert "titan.toml" in str(error)


def test_the_command_and_files_that_are_none(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "titan.toml").write_text(EIGHT)
    assert cli("job", "from-torchtitan", "titan.toml", "--gpus", "8", "--out", "job.toml").code == 0
    checked = cli("plan", "--check", "job.toml", "--cluster", "8xh100")
    assert checked.code == 0, checked.err
    (tmp_path / "titan.toml").write_text("[model")
    refusal = cli("job", "from-torchtitan", "titan.toml")
    assert refusal.code == 2 and "titan.toml cannot be read as TOML" in refusal.err
    (tmp_path / "llama3.py").write_text("raise SystemExit('must not run')")
    refusal = cli("job", "from-torchtitan", "llama3.py")
    assert refusal.code == 2 and "is Python, as torchtitan's configurations are since 0.3" in refusal.err
