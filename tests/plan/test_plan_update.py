"""What the planner counts for an optimizer is what the trainer's keeps."""

from typing import Any

import pytest
import torch

from meshwright.job import Job
from meshwright.model import build_architecture
from meshwright.plan import parse_cluster, predict
from meshwright.train import build_optimizer, states_of

CASES = [
    *((name, states) for name in ("adamw", "lion", "sgd", "muon") for states in ("fp32", "bf16", "int8")),
    ("adafactor", "fp32"),
]


def job_with(name: str, states: str, **optimizer: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"vocab_size": 1024, "width": 512, "layers": 1, "heads": 8, "ffn_width": 1024},
            "optimizer": {"name": name, **optimizer},
            "precision": {"optimizer_states": states},
            "run": {"device": "cpu"},
        }
    )


def counted(job: Job) -> float:
    return predict(job, parse_cluster("1xh100")).fullest.terms["optimizer states"]


@pytest.mark.parametrize(("name", "states"), CASES)
def test_states_have_the_predicted_bytes(name: str, states: str) -> None:
    job = job_with(name, states)
    masters = dict(build_architecture(job.model).model.named_parameters())
    optimizer = build_optimizer(masters, job)
    for master in masters.values():
        master.grad = torch.randn_like(master)
    optimizer.step()
    kept = sum(tensor.nbytes for state in states_of(optimizer, masters).values() for tensor in state.values())
    whole = sum(master.nbytes for master in masters.values())
    assert abs(counted(job) - kept) < 0.02 * whole, (counted(job), kept)


def test_sgd_without_momentum_keeps_nothing() -> None:
    assert counted(job_with("sgd", "fp32", momentum=0.0)) == 0.0


def test_an_update_that_is_not_fused_takes_longer() -> None:
    seconds = {
        case: predict(job_with(*case), parse_cluster("1xh100")).phases["optimizer"]
        for case in (("sgd", "fp32"), ("adamw", "fp32"), ("adamw", "int8"), ("muon", "fp32"))
    }
    assert seconds["adamw", "fp32"] < seconds["sgd", "fp32"] < seconds["muon", "fp32"] < seconds["adamw", "int8"]
