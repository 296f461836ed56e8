"""What a step of a job takes on a cluster: memory and time by named terms, and their error."""

from meshwright.calls import callable_as
from meshwright.job import job_text
from meshwright.plan.accuracy import accuracy_page, accuracy_rows, guessed_rows
from meshwright.plan.clusters import Ask, Machines, enough_machines, on_machines, priced
from meshwright.plan.communication import passed_on
from meshwright.plan.compare import Term, compare_with_plan
from meshwright.plan.economy import Economy, economy
from meshwright.plan.energy import Energy, in_kwh
from meshwright.plan.error_bars import ErrorBars, error_bars, tie_words, tied
from meshwright.plan.explain import (
    batch_sequences,
    layout_words,
    limit,
    simplest,
    small_batch,
    usual_batch_tokens,
    why_not,
)
from meshwright.plan.largest import KINDS as LARGEST_KINDS
from meshwright.plan.largest import Kind, Largest, Within, in_parameters, largest
from meshwright.plan.machine import (
    Machine,
    any_machines,
    machine_of,
    machines_of,
    parse_cluster,
    spelled,
    usual_compute,
)
from meshwright.plan.memory import RankMemory
from meshwright.plan.pareto import Choice, choices, frontier, frontier_words
from meshwright.plan.predict import Prediction, charged, predict, stage_kinds, timeline
from meshwright.plan.question import Found, Question, find_layouts, question, refusal
from meshwright.plan.remedies import what_would_fit
from meshwright.plan.scale import Point, scale, scale_lines
from meshwright.plan.search import Candidate, Search, order_of, search
from meshwright.plan.sensitivity import Gain, Sensitivity, sensitivity
from meshwright.plan.software import MESHWRIGHT, MESHWRIGHT_COMPILED, Software
from meshwright.plan.space import ALLOWED
from meshwright.plan.stages import StageCompute
from meshwright.plan.step import MEASURED, TimedCompute, places_of
from meshwright.plan.target import check_target, target_of, why_refused
from meshwright.plan.validate import Validation, validate

__all__ = [
    "ALLOWED",
    "LARGEST_KINDS",
    "MEASURED",
    "MESHWRIGHT",
    "MESHWRIGHT_COMPILED",
    "Ask",
    "Candidate",
    "Choice",
    "Economy",
    "Energy",
    "ErrorBars",
    "Found",
    "Gain",
    "Kind",
    "Largest",
    "Machine",
    "Machines",
    "Point",
    "Prediction",
    "Question",
    "RankMemory",
    "Search",
    "Sensitivity",
    "Software",
    "StageCompute",
    "Term",
    "TimedCompute",
    "Validation",
    "Within",
    "accuracy_page",
    "accuracy_rows",
    "any_machines",
    "batch_sequences",
    "charged",
    "check_target",
    "choices",
    "compare_with_plan",
    "economy",
    "enough_machines",
    "error_bars",
    "find_layouts",
    "frontier",
    "frontier_words",
    "guessed_rows",
    "in_kwh",
    "in_parameters",
    "job_text",
    "largest",
    "layout_words",
    "limit",
    "machine_of",
    "machines_of",
    "on_machines",
    "order_of",
    "parse_cluster",
    "passed_on",
    "places_of",
    "predict",
    "priced",
    "question",
    "refusal",
    "scale",
    "scale_lines",
    "search",
    "sensitivity",
    "simplest",
    "small_batch",
    "spelled",
    "stage_kinds",
    "target_of",
    "tie_words",
    "tied",
    "timeline",
    "usual_batch_tokens",
    "usual_compute",
    "validate",
    "what_would_fit",
    "why_not",
    "why_refused",
]

callable_as(__name__, "meshwright.api.planning", "plan")
