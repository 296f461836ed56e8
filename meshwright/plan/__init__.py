"""What a step of a job takes on a cluster: memory and time by named terms, and their error."""

from meshwright.calls import callable_as
from meshwright.job import job_text
from meshwright.plan.accuracy import accuracy_page, accuracy_rows, guessed_rows
from meshwright.plan.compare import Term, compare_with_plan
from meshwright.plan.economy import Economy, economy
from meshwright.plan.error_bars import ErrorBars, error_bars, tie_words, tied
from meshwright.plan.explain import (
    batch_sequences,
    fine_tuning_batch,
    layout_words,
    limit,
    simplest,
    small_batch,
    usual_batch_tokens,
    why_not,
)
from meshwright.plan.machine import Machine, machine_of, machines_of, parse_cluster, spelled, usual_compute
from meshwright.plan.memory import RankMemory
from meshwright.plan.predict import Prediction, predict, timeline
from meshwright.plan.scale import Point, scale, scale_lines
from meshwright.plan.search import Candidate, Search, search, what_would_fit
from meshwright.plan.software import MESHWRIGHT, MESHWRIGHT_COMPILED, Software
from meshwright.plan.space import ALLOWED
from meshwright.plan.target import check_target, target_of
from meshwright.plan.validate import Validation, validate

__all__ = [
    "ALLOWED",
    "MESHWRIGHT",
    "MESHWRIGHT_COMPILED",
    "Candidate",
    "Economy",
    "ErrorBars",
    "Machine",
    "Point",
    "Prediction",
    "RankMemory",
    "Search",
    "Software",
    "Term",
    "Validation",
    "accuracy_page",
    "accuracy_rows",
    "batch_sequences",
    "check_target",
    "compare_with_plan",
    "economy",
    "error_bars",
    "fine_tuning_batch",
    "guessed_rows",
    "job_text",
    "layout_words",
    "limit",
    "machine_of",
    "machines_of",
    "parse_cluster",
    "predict",
    "scale",
    "scale_lines",
    "search",
    "simplest",
    "small_batch",
    "spelled",
    "target_of",
    "tie_words",
    "tied",
    "timeline",
    "usual_batch_tokens",
    "usual_compute",
    "validate",
    "what_would_fit",
    "why_not",
]

callable_as(__name__, "meshwright.api.planning", "plan")
