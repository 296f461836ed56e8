"""Errors and hints of the planner in the words of its page, and the field of the form that they are about."""

import re

from meshwright.errors import UserError

LABELS = {
    "model": "Preset",
    "gpu": "GPU",
    "nodes": "Nodes",
    "gpus": "GPUs per node",
    "node_link": "Link inside a node",
    "network_link": "Network",
    "seq": "Sequence",
    "batch": "Batch",
    "allow": "Allowed",
    "tokens": "Tokens",
    "days": "Days",
    "price": "Price",
    "budget": "Budget",
    "clusters": "Clusters",
    "pue": "PUE",
    "co2": "CO₂",
    "ask": "Question",
    "experts.count": "experts",
    "experts.top_k": "experts per token",
    "experts.ffn_width": "expert width",
    "experts.shared_width": "shared expert width",
}
"""What the form calls its fields; it shows those of a model's shape with spaces for underscores."""

# An option or a job's field, what the page calls it, and the field of the form.
_WORDS = (
    (r"--seq\b", LABELS["seq"], "seq"),
    (r"--batch-tokens\b", LABELS["batch"], "batch"),
    (r"--allow (fp8|offload|zero-bubble)\b", r"\1 under Allowed", "allow"),
    (r"--allow\b", LABELS["allow"], "allow"),
    (r"\bon --cluster = ", "on ", None),
    (r"--compare\b", LABELS["clusters"], "clusters"),
    (r"--budget\b", LABELS["budget"], "budget"),
    (r"\bcluster\.pue\b", LABELS["pue"], "pue"),
    (r"\bcluster\.co2_g_per_kwh\b", "the CO₂ of a kWh", "co2"),
    (r"--cluster 1x(\d+)x[\w-]+", r"\1 GPUs in a node", None),
    (r"--cluster (\d+)x(\d+)x[\w-]+", r"\1 nodes with \2 GPUs each", None),
    (r"name one of (\d+) with --cluster or change the layout", r"choose \1 GPUs or another layout", None),
    (r"--set model\.adapter\.(\w+)=(\w+)", r"\1 \2", None),
    (r"\bmodel\.preset\b", LABELS["model"], "model"),
    (r"\bmax_sequence_length\b", "longest sequence", None),
)
_SHAPE_FIELD = re.compile(r"\bmodel\.(\w+(?:\.\w+)?)")
_JOB_FIELD = re.compile(r"\b(?:model|layout|memory|batch|precision)\.([a-z]\w*(?:\.[a-z]\w*)?)")


class FieldError(UserError):
    """An error about one field of the form."""

    def __init__(self, field: str, words: str) -> None:
        super().__init__(words)
        self.field = field


def label(field: str) -> str:
    """What the page calls a field."""
    return LABELS.get(field) or field.replace("_", " ").replace(".", " ")


def in_page_words(text: str) -> str:
    """A sentence about options and job fields as one about what is on the page."""
    for pattern, words, _ in _WORDS:
        text = re.sub(pattern, words, text)
    return _JOB_FIELD.sub(lambda found: label(found[1]) if "." in found[1] else found[1].replace("_", " "), text)


def field_of(error: UserError) -> str | None:
    """The field of the form that an error is about, if it is about one."""
    if isinstance(error, FieldError):
        return error.field
    text = str(error)
    named = [(found.start(), field) for pattern, _, field in _WORDS if field and (found := re.search(pattern, text))]
    if named:
        return min(named)[1]
    found = _SHAPE_FIELD.search(text)
    return found[1] if found else None
