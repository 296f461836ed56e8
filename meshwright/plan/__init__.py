"""From a job and a cluster to what a step takes: memory and time by named terms, and their error."""

from meshwright.plan.accuracy import accuracy_page, accuracy_rows
from meshwright.plan.machine import Machine, machine_of, parse_cluster
from meshwright.plan.memory import RankMemory
from meshwright.plan.predict import Prediction, predict
from meshwright.plan.software import MESHWRIGHT, MESHWRIGHT_COMPILED, Software
from meshwright.plan.validate import Validation, validate

__all__ = [
    "MESHWRIGHT",
    "MESHWRIGHT_COMPILED",
    "Machine",
    "Prediction",
    "RankMemory",
    "Software",
    "Validation",
    "accuracy_page",
    "accuracy_rows",
    "machine_of",
    "parse_cluster",
    "predict",
    "validate",
]
