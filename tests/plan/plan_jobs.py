"""Jobs that the planner's tests share."""

from typing import Any

from meshwright.job import Job, model_preset
from meshwright.job.devices import Cluster


def llama(preset: str = "llama-3-8b", **sections: Any) -> Job:
    """A preset's model in bf16, sections as given."""
    model = {**model_preset(preset), **sections.pop("model", {})}
    return Job.model_validate({"model": model, "precision": {"compute": "bf16"}, **sections})


def nodes(count: int, gpu: str = "h100") -> Cluster:
    """So many nodes of eight."""
    return Cluster(nodes=count, gpus_per_node=8, gpu=gpu)


def asked(preset: str, sequence: int, batch: int, **sections: Any) -> Job:
    """A preset as it is usually trained, in bf16 and compiled: what a search is given."""
    sizes = {"sequence_length": sequence, "global_batch": batch, "micro_batch": 1}
    return llama(preset, batch=sizes, run={"compile": True}, **sections)
