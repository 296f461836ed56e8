"""What is counted for an optimizer is what the trainer's keeps, in plans and in the room a checkpoint needs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from meshwright.checkpoint import newest
from meshwright.cost import checkpoint_bytes, moments_of, state_bytes
from meshwright.job import FORMAT_BYTES, Job, load_job
from meshwright.launch.worker import run_job
from meshwright.model import build_architecture, count_parameters
from meshwright.model.numbers import DTYPES
from meshwright.model.sharding import PROJECTIONS
from meshwright.plan import parse_cluster, predict
from meshwright.train import build_optimizer, states_of

CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((name, states, {}) for name in ("adamw", "lion", "sgd", "muon") for states in ("fp32", "bf16", "int8")),
    ("adafactor", "fp32", {}),
    ("sgd", "fp32", {"momentum": 0.0}),
    ("sgd", "int8", {"momentum": 0.0}),
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


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "states", "more"), CASES)
def test_states_have_the_bytes_that_are_counted(name: str, states: str, more: dict[str, Any]) -> None:
    """Of every matrix, and in a plan; vectors are exact and a count of steps is kept, which are thousandths."""
    job = job_with(name, states, **more)
    architecture = build_architecture(job.model)
    masters = dict(architecture.model.named_parameters())
    optimizer = build_optimizer(masters, job)
    for master in masters.values():
        master.grad = torch.randn_like(master)
    optimizer.step()
    kept = {
        parameter: sum(tensor.nbytes for tensor in state.values())
        for parameter, state in states_of(optimizer, masters).items()
    }
    counted = {}
    for parameter, master in masters.items():
        projects = architecture.role(parameter.rpartition(".")[0]) in PROJECTIONS
        counted[parameter] = state_bytes(job, *((master.numel(), 0) if projects else (0, master.numel())))
    for parameter, master in masters.items():
        if master.dim() == 2:  # scales of narrow matrices are shared by fewer than 128 columns, means are lines
            assert abs(counted[parameter] - kept[parameter]) < 0.03 * master.nbytes, parameter
    whole = sum(master.nbytes for master in masters.values())
    planned = predict(job, parse_cluster("1xh100")).fullest.terms["optimizer states"]
    assert abs(planned - sum(kept.values())) < 0.02 * whole, (planned, sum(kept.values()))
    assert (moments_of(job.optimizer) == 0) == (name == "adafactor" or more == {"momentum": 0.0})


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_a_checkpoint_takes_what_the_disk_is_asked_for(optimizer: str, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\npreset = "tiny-llama"\n[data]\nsources = ["builtin:synthetic"]\nworkers = 0\n'
        "[batch]\nsequence_length = 32\nglobal_batch = 4\n[evaluation]\nevery_steps = 0\n"
        f'[optimizer]\nname = "{optimizer}"\n[run]\nsteps = 1\ndevice = "cpu"\nfolder = "{tmp_path}/run"\n'
    )
    loaded = load_job(str(job))
    run_job(loaded, Console(quiet=True), None)
    counted = checkpoint_bytes(loaded.job, count_parameters(loaded.job.model))
    written = sum(file.stat().st_size for file in newest(tmp_path / "run").path.glob("*.safetensors"))
    assert counted == pytest.approx(written, rel=0.05)


def test_bytes_of_formats_are_torch_s() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} | {"int8": 1} == FORMAT_BYTES


def test_an_update_that_is_not_fused_takes_longer() -> None:
    seconds = {
        case: predict(job_with(*case), parse_cluster("1xh100")).phases["optimizer"]
        for case in (("sgd", "fp32"), ("adamw", "fp32"), ("adamw", "int8"), ("muon", "fp32"))
    }
    assert seconds["adamw", "fp32"] < seconds["sgd", "fp32"] < seconds["muon", "fp32"] < seconds["adamw", "int8"]
