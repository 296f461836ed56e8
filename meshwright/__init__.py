"""Meshwright plans, verifies and runs LLM training.

What this package offers to programs is imported when it is first used: `import meshwright` itself costs nothing.
"""

import os
from importlib import import_module
from typing import Any

from meshwright.version import VERSION as __version__

# OpenMP's threads spin while they wait for work, and on a busy machine the thread that all wait for may have no
# core: a training loop on two cores was six times slower there. Here they sleep, unless the user has set how they wait.
# OpenMP reads this once, when torch is loaded; processes that this one starts inherit it.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

_PLACES = {
    "meshwright.api": ("Checkpoint", "Run", "bench", "load_job", "open_run", "ray"),
    "meshwright.errors": ("UserError",),
    "meshwright.job": ("Job",),
    "meshwright.registries": (
        "register_loss",
        "register_optimizer",
        "register_schedule",
        "register_sink",
        "register_source",
    ),
    "meshwright.runs.callbacks": ("Callback",),
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}
_ROOMS = ("data", "plan", "rehearse", "train", "verify")
"""Packages that programs use by attribute; but for data they can be called, see `calls`."""

__all__ = ["__version__", *_PLACE_OF, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"meshwright.{name}")
    if name not in _PLACE_OF:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
