"""CUDA graphs of micro-batches: the same losses with them, and training that continues where there are none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.data import prepare
from meshwright.job import Job, load_job
from meshwright.parallel import PipeDream, World, build, cuda_graph, engine
from meshwright.train import Silent, Trainer


class Memory(Silent):
    """A recorder that remembers losses and events of graphs."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.graphs: list[tuple[str, str]] = []

    def metric(self, row: dict[str, Any]) -> None:
        if "loss" in row:
            self.losses.append(row["loss"])

    def event(self, kind: str, **fields: Any) -> None:
        if kind == "cuda_graph":
            self.graphs.append((fields["state"], fields["reason"]))


def train(job: Job, device: str = "cpu") -> Memory:
    memory, world = Memory(), World(torch.device(device))
    made, weights = build(job, world)
    assert not isinstance(made, PipeDream)
    Trainer(job, prepare(job.data, job.model.vocab_size), made, weights, memory, memory, world).run()
    return memory


def job_of(tiny_job: Path, *overrides: str) -> Job:
    words = ["evaluation.every_steps=0", "run.steps=4", "batch.micro_batch=4", "batch.global_batch=8", *overrides]
    return load_job(str(tiny_job), ["data.cache=cache", *words]).job


def test_a_job_that_cannot_be_captured_is_told_why_and_trained(tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_job.parent)
    plain, asked = train(job_of(tiny_job)), train(job_of(tiny_job, "run.cuda_graph=true"))
    assert plain.graphs == [] and asked.graphs == [("off", "there is no CUDA device")]
    assert asked.losses == plain.losses
    world = World(torch.device("cuda"))
    assert cuda_graph.why_no_graph(job_of(tiny_job), world) is None
    reason = cuda_graph.why_no_graph(job_of(tiny_job, "data.mask_documents=true"), world)
    assert reason == "documents change the shapes of attention"


def test_a_capture_that_fails_leaves_nothing_behind(tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU every capture fails, here after a forward and backward that left gradients."""
    monkeypatch.chdir(tiny_job.parent)
    plain = train(job_of(tiny_job))
    monkeypatch.setattr(engine, "why_no_graph", lambda job, world: None)
    monkeypatch.setattr(engine, "STEPS_BEFORE", 1)
    monkeypatch.setattr(cuda_graph.MicroBatchGraph, "_warm_up", lambda self: self._forward_and_backward())
    failing = train(job_of(tiny_job, "run.cuda_graph=true"))
    [(state, reason)] = failing.graphs
    errors = ("RuntimeError", "AttributeError", "AssertionError", "AcceleratorError")  # as torch was built
    assert state == "off" and reason.startswith(errors), reason
    assert failing.losses == plain.losses


def test_no_input_is_left_out(tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures and sound are excluded by name, and whatever else a model is given when it is to be captured."""
    assert cuda_graph.why_no_graph(load_job("vlm-tiny").job, World(torch.device("cuda"))) is not None
    monkeypatch.chdir(tiny_job.parent)
    plain = train(job_of(tiny_job, "data.mask_documents=true"))
    monkeypatch.setattr(engine, "why_no_graph", lambda job, world: None)
    monkeypatch.setattr(engine, "STEPS_BEFORE", 1)
    masked = train(job_of(tiny_job, "data.mask_documents=true", "run.cuda_graph=true"))
    assert masked.graphs == [("off", "the model is given positions, documents, which a graph does not read")]
    assert masked.losses == plain.losses


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("compiled", ["true", "false"])
def test_a_graph_trains_as_launches_do(
    precision: str, compiled: str, tiny_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_job.parent)
    words = [f"precision.compute={precision}", f"run.compile={compiled}", "run.steps=14", "run.deterministic=true"]
    plain = train(job_of(tiny_job, *words), "cuda")
    graphed = train(job_of(tiny_job, *words, "run.cuda_graph=true"), "cuda")
    assert [state for state, _ in graphed.graphs] == ["captured", "captured"], graphed.graphs
    assert graphed.losses == pytest.approx(plain.losses, rel=1e-5 if precision == "fp32" else 5e-3)
