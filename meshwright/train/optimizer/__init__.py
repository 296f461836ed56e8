"""Optimizers over master weights: full ones, or a rank's shards of them."""

from meshwright.train.optimizer.build import (
    Optimizer,
    build_optimizer,
    clip_factor,
    clip_gradients,
    set_learning_rate,
    states_of,
)
from meshwright.train.optimizer.onepass import OnePassAdamW
from meshwright.train.optimizer.saved import missing_states, parameter_of, restore_states, saved_states

__all__ = [
    "OnePassAdamW",
    "Optimizer",
    "build_optimizer",
    "clip_factor",
    "clip_gradients",
    "missing_states",
    "parameter_of",
    "restore_states",
    "saved_states",
    "set_learning_rate",
    "states_of",
]
