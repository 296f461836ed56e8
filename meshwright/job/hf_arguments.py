"""Hugging Face Trainer arguments that one table says all about: the field of a job, or the values without effect."""

from typing import Any

from meshwright.job.convert import ANY, Field, Ignored, Noted, Passed, Rule
from meshwright.job.hf_sft import RULES as SFT_RULES

_SAME: dict[str, Rule] = {
    "output_dir": Field("run.folder"),
    "learning_rate": Field("optimizer.lr", float),
    "weight_decay": Field("optimizer.weight_decay", float),
    "adam_epsilon": Field("optimizer.eps", float),
    "full_determinism": Field("run.deterministic"),
    "torch_compile": Field("run.compile"),
    "dataloader_num_workers": Field("data.workers"),
    "dataloader_pin_memory": Field("data.pin_memory"),
}
_ANYTHING = """
do_train do_eval do_predict local_rank remove_unused_columns length_column_name
dataloader_persistent_workers eval_on_start eval_do_concat_batches eval_use_gather_object
log_level log_level_replica log_on_each_node disable_tqdm logging_first_step logging_nan_inf_filter logging_dir
include_tokens_per_second skip_memory_metrics prediction_loss_only fsdp_transformer_layer_cls_to_wrap
hub_token hub_private_repo hub_strategy push_to_hub_token
"""
"""Script flags, verbosity, the format of results, and what is always the case here: workers live as long as the run, a
run starts with an evaluation."""
_SPEED = """
dataloader_multiprocessing_context dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
ddp_find_unused_parameters ddp_static_graph ddp_timeout torch_empty_cache_steps use_liger_kernel
"""
"""How data is read and sent, and which kernels run."""
_ONLY: dict[str, list[Any]] = {
    "label_names": [None, []],
    "label_smoothing_factor": [0.0],
    "neftune_noise_alpha": [None],
    "optim_args": [None, ""],
    "optim_target_modules": [None],
    "liger_kernel_config": [None],
    "torch_compile_backend": [None, "inductor"],
    "torch_compile_mode": [None, "default"],
    "use_cache": [False],
    "bf16_full_eval": [False],
    "fp16_full_eval": [False],
    "fp16_opt_level": ["O1"],
    "fp16_backend": ["auto"],
    "half_precision_backend": ["auto"],
    "jit_mode_eval": [False],
    "include_num_input_tokens_seen": ["no", False],
    "include_for_metrics": [[]],
    "include_inputs_for_metrics": [False],
    "batch_eval_metrics": [False],
    "eval_delay": [0],
    "eval_accumulation_steps": [None],
    "project": ["huggingface"],
    "trackio_space_id": [None, "trackio"],
    "trackio_bucket_id": [None],
    "trackio_static_space_id": [None],
    "save_safetensors": [True],
    "save_on_each_node": [False],
    "restore_callback_states_from_checkpoint": [False],
    "metric_for_best_model": [None],
    "greater_is_better": [None],
    "ignore_data_skip": [False],
    "parallelism_config": [None],
    "dataloader_in_order": [True],
    "split_batches": [None, False],
    "dispatch_batches": [None],
    "fsdp_min_num_params": [0],
    "tpu_num_cores": [None],
    "past_index": [-1],
    "mp_parameters": [""],
    "ray_scope": ["last"],
    "debug": ["", []],
    "torchdynamo": [None],
    "hub_model_id": [None],
    "hub_always_push": [False],
    "hub_revision": [None],
    "push_to_hub_model_id": [None],
    "push_to_hub_organization": [None],
}
"""Settings without a counterpart, and their values (the defaults) that have no effect."""
_INSTEAD: dict[str, Rule] = {
    "average_tokens_across_devices": Passed([True], "the loss is always divided by the valid tokens: remove it"),
    "auto_find_batch_size": Passed([False], "use meshwright tune"),
    "train_sampling_strategy": Passed(["random"], 'data.packing = "none" groups by length'),
    "group_by_length": Passed([False], 'data.packing = "none" groups by length'),
    "resume_from_checkpoint": Passed([None, ""], "use meshwright train --resume"),
    "load_best_model_at_end": Passed([False], "checkpoint.keep_every keeps checkpoints to choose from"),
    "enable_jit_checkpoint": Passed([False], "a signal always saves a checkpoint here: remove it"),
    "push_to_hub": Passed([False], "checkpoint export writes a folder for the hub"),
    "overwrite_output_dir": Passed([False], "no run is overwritten: name another output_dir, or train --resume"),
    "save_only_model": Passed([False], "every checkpoint can be resumed, and checkpoint export writes the model"),
}
_KERNELS = "attention runs on the fastest kernel that fits, measured at the start; none keeps the whole matrix"
_SCRIPT: dict[str, Rule] = {
    **dict.fromkeys(("model_name", "model_name_or_path", "model_id"), Field("model.init_from")),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "max_length", "block_size"), Field("batch.sequence_length")),
    **dict.fromkeys(("attn_implementation", "use_flash_attention_2", "use_flash_attn"), Noted(_KERNELS)),
    **dict.fromkeys(("torch_dtype", "dtype"), Noted("master weights are fp32, and precision.compute is what runs")),
    **dict.fromkeys(
        ("dataset_name", "dataset_config_name", "train_file", "validation_file", "data_path"),
        Noted("set data.sources to the files"),
    ),
    "trust_remote_code": Passed([False], "code that comes with a model is never run: use a supported model"),
}
"""What scripts around the Trainer add to its arguments."""
RULES: dict[str, Rule] = {
    **_SCRIPT,
    **_SAME,
    **{name: Passed(ANY) for name in _ANYTHING.split()},
    **{name: Ignored() for name in _SPEED.split()},
    **{name: Passed(values) for name, values in _ONLY.items()},
    **_INSTEAD,
    **SFT_RULES,
}
