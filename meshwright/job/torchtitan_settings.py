"""Torchtitan's settings (job_config.py of 0.2.2) that one table says all about, and the models it knows."""

from typing import Any

from meshwright.job.convert import Field, Ignored, Noted, Passed, Rule

_SCALED = {
    "max_sequence_length": 131072,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_sequence_length": 8192,
    },
}  # fmt: skip
"""Every llama3 there has the positions of Llama 3.1."""
MODELS: dict[tuple[str, str], dict[str, Any]] = {
    ("llama3", "debugmodel"): {
        "vocab_size": 2048, "width": 256, "layers": 6, "heads": 16, "ffn_width": 768, "rope_theta": 500000.0, **_SCALED,
    },
    ("llama3", "8B"): {"preset": "llama-3-8b", **_SCALED},
    ("llama3", "70B"): {"preset": "llama-3-70b", **_SCALED},
    ("llama3", "405B"): {"preset": "llama-3.1-405b"},
    **{("qwen3", size): {"preset": f"qwen3-{size.lower()}"} for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
}  # fmt: skip
"""The name and flavor of a model there → the fields of ours."""
MASKED = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")
"""Ends of a flavor whose attention stays within documents."""
SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "zb-interleaved",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}
"""Pipeline schedules by torch's names."""
FLOAT8 = "quantize.linear.float8"
SECTIONS = ("fault_tolerance", "memory_estimation")
"""Without a counterpart, accepted as long as their `enable` is false."""
_CODE = "code of your own is not run; write the model as model.file"
_IGNORED = """
job.config_file job.description job.print_config job.save_config_file model.print_after_conversion
profiling.save_traces_folder profiling.profile_freq profiling.profiler_active profiling.profiler_warmup
profiling.save_memory_snapshot_folder metrics.disable_color_printing metrics.save_tb_folder metrics.save_for_all_ranks
optimizer.implementation training.gc_freq training.gc_debug training.dataloader.persistent_workers
training.dataloader.prefetch_factor validation.dataloader.num_workers validation.dataloader.persistent_workers
validation.dataloader.pin_memory validation.dataloader.prefetch_factor
parallelism.disable_loss_parallel
parallelism.pipeline_parallel_expert_parallel_overlap parallelism.context_parallel_load_balancer
parallelism.expert_parallel_degree parallelism.expert_tensor_parallel_degree
parallelism.expert_parallel_comm_backend checkpoint.folder checkpoint.async_mode
checkpoint.enable_ft_dataloader_checkpoints checkpoint.enable_first_step_checkpoint checkpoint.last_save_model_only
checkpoint.export_dtype activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns
activation_checkpoint.early_stop activation_checkpoint.visualize_memory_budget_pareto
activation_checkpoint.preserve_rng_state activation_checkpoint.determinism_check activation_checkpoint.debug
comm.init_timeout_seconds comm.trace_buf_size comm.save_traces_folder comm.save_traces_file_prefix
debug.deterministic_warn_only debug.moe_force_load_balance
"""
"""Folders, output, speed, and what only experts or a fault-tolerant run have."""
RULES: dict[str, Rule] = {
    **{name: Ignored() for name in _IGNORED.split()},
    "job.dump_folder": Field("run.folder"),
    "job.custom_config_module": Passed([""], _CODE),
    "experimental.custom_import": Passed([""], _CODE),
    "experimental.custom_args_module": Passed([""], _CODE),
    "training.max_norm": Field("optimizer.clip", float),
    "training.dtype": Passed(["float32"], "master weights are fp32 here: write float32"),
    "training.dataloader.num_workers": Field("data.workers"),
    "training.dataloader.pin_memory": Field("data.pin_memory"),
    "optimizer.early_step_in_backward": Passed([False], "gradients are clipped before the update: write false"),
    "metrics.log_freq": Field("log.every_steps"),
    "profiling.enable_profiling": Noted("meshwright train --trace STEPS writes a profile"),
    "profiling.enable_memory_snapshot": Noted("every report shows memory by kind"),
    "comm.train_timeout_seconds": Noted("a collective may take that long there; run.watchdog_s watches steps"),
    "comm.mode": Passed(["default"], "meshwright verify runs a layout without its GPUs: write default"),
    "checkpoint.last_save_in_hf": Noted("meshwright checkpoint export writes the Hugging Face folder"),
    "checkpoint.load_step": Passed([-1], "use meshwright train --resume"),
    "checkpoint.exclude_from_loading": Passed([[]], "model.init_from loads the weights alone: remove it"),
    "checkpoint.initial_load_model_only": Passed([True], "only weights are loaded from elsewhere: write true"),
    "checkpoint.initial_load_in_hf_quantized": Passed([False], "quantised weights are not read: write false"),
    "checkpoint.create_seed_checkpoint": Passed([False], "weights depend on run.seed alone, not the layout: remove it"),
    "checkpoint.load_only": Passed([False], "a run always saves its end: remove it"),
    "compile.backend": Passed(["inductor"], "only inductor is used: remove it"),
    "debug.deterministic": Field("run.deterministic"),
}
"""Settings that are not given have torchtitan's defaults, not ours."""
