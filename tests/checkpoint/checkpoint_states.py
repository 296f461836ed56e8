"""Small states to save, without a run around them."""

from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import Facts, Lease, Part, Saver, State
from meshwright.job import Job, Model, model_preset
from meshwright.model import Decoder, initialise


def tiny(seed: int, **changes: object) -> Decoder:
    model = Decoder(Model(**{**model_preset("tiny-llama"), **changes}))
    initialise(model, seed)
    return model


def state_of(model: Decoder, step: int) -> State:
    parts = [Part(f"model/{name}", tuple(p.shape), (0,) * p.dim(), p.detach()) for name, p in model.named_parameters()]
    return State(Facts(step=step, tokens=10 * step, position=step), parts)


class Reports:
    """What a saver had to say."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.messages: list[str] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})


def make_saver(run: Path, told: Reports | None = None, lease: Lease | None = None, **settings: Any) -> Saver:
    told = told or Reports()
    callbacks = {name: settings.pop(name) for name in ("flush", "alive") if name in settings}
    allocate = settings.pop("allocate", lambda size: torch.empty(size, dtype=torch.uint8))
    job = Job.model_validate({"checkpoint": {"keep_last": 100, **settings}, "cluster": {"mtbf_hours": 1.0}})
    return Saver(
        job,
        lease or Lease.claim(run),
        told.event,
        told.messages.append,
        allocate,
        **callbacks,
    )


def save_model(run: Path, step: int, model: Decoder, **settings: Any) -> Path:
    return make_saver(run, **settings).finish(step, lambda: state_of(model, step))
