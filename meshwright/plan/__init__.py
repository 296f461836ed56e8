"""From a job and a cluster to what a step takes: memory and time by named terms, and their error."""

from meshwright.plan.accuracy import accuracy_page, accuracy_rows
from meshwright.plan.explain import batch_sequences, job_text, layout_words, limit, usual_batch_tokens, why_not
from meshwright.plan.machine import Machine, machine_of, parse_cluster
from meshwright.plan.memory import RankMemory
from meshwright.plan.predict import Prediction, predict, timeline
from meshwright.plan.search import Candidate, Search, search
from meshwright.plan.software import MESHWRIGHT, MESHWRIGHT_COMPILED, Software
from meshwright.plan.validate import Validation, validate

__all__ = [
    "MESHWRIGHT",
    "MESHWRIGHT_COMPILED",
    "Candidate",
    "Machine",
    "Prediction",
    "RankMemory",
    "Search",
    "Software",
    "Validation",
    "accuracy_page",
    "accuracy_rows",
    "batch_sequences",
    "job_text",
    "layout_words",
    "limit",
    "machine_of",
    "parse_cluster",
    "predict",
    "search",
    "timeline",
    "usual_batch_tokens",
    "validate",
    "why_not",
]
