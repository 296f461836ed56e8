"""Parameters that a pipeline rank holds although another stage updates them: they have no optimizer states.

The last stage's table is such a copy if it equals the first one's, and so is all of a second chain of stages.
"""

from meshwright.cost import Elements, stage_elements
from meshwright.job import Job
from meshwright.pipeline import Table
from meshwright.plan.groups import stage_ranges


def copies_of(job: Job, layers: list[int], table: Table | None, rank: int) -> tuple[Elements, Elements]:
    """What a rank holds of such parameters: in blocks, and in tables."""
    blocks = tables = Elements()
    model, ranges = job.model, stage_ranges(layers)
    if table is None or model.adapter is not None or not _learns(job):
        return blocks, tables
    for stage in table.stages_of(rank):
        place, ends = stage % len(layers), {"first": stage % len(layers) == 0, "last": (stage + 1) % len(layers) == 0}
        if stage >= len(layers):
            inside = stage_elements(job, ranges[place], first=False, last=False)
            whole = stage_elements(job, ranges[place], **ends)
            blocks, tables = blocks + inside, tables + whole + inside * -1
        elif ends["last"] and (model.tied or model.extra_tokens):
            tables += Elements(model.vocab_size * model.width / job.layout.tp)
    return blocks, tables


def _learns(job: Job) -> bool:
    """Whether the decoder is trained."""
    return job.model.encoder is None or "decoder" in job.model.encoder.train
