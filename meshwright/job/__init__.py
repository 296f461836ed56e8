"""The Job: one file that the planner writes and everything else reads. Imports no torch."""

from meshwright.job.adapter import Adapter
from meshwright.job.convert import Converted
from meshwright.job.data import require_data
from meshwright.job.from_deepspeed import job_from_deepspeed
from meshwright.job.from_hf_trainer import job_from_hf_trainer
from meshwright.job.from_megatron import job_from_megatron
from meshwright.job.from_torchtitan import job_from_torchtitan
from meshwright.job.hf_config import (
    model_from_hf_config,
    model_of_config,
    model_of_folder,
    model_to_hf_config,
    read_hf_config,
)
from meshwright.job.hub import folder_of, holds_weights, hub_name
from meshwright.job.init_from import fetch_start, pinned_start, require_base, start_folder
from meshwright.job.job import Job
from meshwright.job.load import (
    LoadedJob,
    changed_job,
    job_fields,
    job_of_table,
    job_schema,
    load_job,
    planned_text,
    table_fields,
    updated_text,
)
from meshwright.job.model import Latent, Model, RopeScaling
from meshwright.job.overrides import Overrides, override_fields, override_values
from meshwright.job.preference import Preference
from meshwright.job.presets import is_model_folder, model_preset, model_presets, preset_named, recipes, unknown_model
from meshwright.job.text import job_text, toml_value
from meshwright.job.training import FORMAT_BYTES
from meshwright.job.trust import code_of, require_trust

__all__ = [
    "FORMAT_BYTES",
    "Adapter",
    "Converted",
    "Job",
    "Latent",
    "LoadedJob",
    "Model",
    "Overrides",
    "Preference",
    "RopeScaling",
    "changed_job",
    "code_of",
    "fetch_start",
    "folder_of",
    "holds_weights",
    "hub_name",
    "is_model_folder",
    "job_fields",
    "job_from_deepspeed",
    "job_from_hf_trainer",
    "job_from_megatron",
    "job_from_torchtitan",
    "job_of_table",
    "job_schema",
    "job_text",
    "load_job",
    "model_from_hf_config",
    "model_of_config",
    "model_of_folder",
    "model_preset",
    "model_presets",
    "model_to_hf_config",
    "override_fields",
    "override_values",
    "pinned_start",
    "planned_text",
    "preset_named",
    "read_hf_config",
    "recipes",
    "require_base",
    "require_data",
    "require_trust",
    "start_folder",
    "table_fields",
    "toml_value",
    "unknown_model",
    "updated_text",
]
