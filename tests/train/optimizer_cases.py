"""Small jobs and named parameters that tests of optimizers update."""

from typing import Any

import torch
from torch import nn

from meshwright.job import Job

MODEL = {"vocab_size": 40, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_width": 48}
PROJECTIONS = {"q", "k", "v", "o", "gate", "up", "down"}


def make_job(name: str, form: str = "fp32", layout: dict[str, int] | None = None, **settings: Any) -> Job:
    return Job.model_validate(
        {
            "model": MODEL | {"max_sequence_length": 16},
            "batch": {"sequence_length": 16, "global_batch": 4, "micro_batch": 1},
            "data": {"sources": ["builtin:synthetic"], "mask_documents": True, "workers": 0},
            "evaluation": {"every_steps": 0},
            "schedule": {"warmup_steps": 1},
            "run": {"steps": 3, "device": "cpu"},
            "layout": layout or {},
            "optimizer": {"name": name, "lr": 1e-2, **settings},
            "precision": {"optimizer_states": form},
        }
    )


def random_masters(dtype: torch.dtype = torch.float64, **shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    """Masters under the names of a model's; the keyword `ffn_up` becomes layers.0.ffn.up.weight."""
    draw = torch.Generator().manual_seed(1)
    names = {key: key if "." in key else f"layers.0.{key.replace('_', '.', 1)}.weight" for key in shapes}
    return {names[k]: nn.Parameter(torch.randn(s, generator=draw, dtype=dtype)) for k, s in shapes.items()}


def give_gradients(masters: dict[str, nn.Parameter], seed: int, scale: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(seed)
    for master in masters.values():
        master.grad = scale * torch.randn(master.shape, generator=draw, dtype=master.dtype)


def side_by_side(masters: dict[str, nn.Parameter], ours: Any, theirs: Any, steps: int = 5) -> float:
    """The largest difference, in parts of the largest entry, after steps over the same gradients."""
    copies = {name: nn.Parameter(master.detach().clone()) for name, master in masters.items()}
    first, second = ours(masters), theirs(copies)
    for step in range(steps):
        give_gradients(masters, step)
        give_gradients(copies, step)
        first.step()
        second.step()
    return max(float(((masters[n] - p).abs().max() / p.abs().max()).detach()) for n, p in copies.items())
