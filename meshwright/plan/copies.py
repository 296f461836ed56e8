"""Parameters that a pipeline rank holds although another stage updates them: they have no optimizer states.

The last stage's table is such a copy if it equals the first one's, and so is all of a second chain of stages.
"""

from meshwright.cost import Elements, stage_elements
from meshwright.job import Job
from meshwright.pipeline import Table
from meshwright.plan.groups import stage_ranges


def copies_of(job: Job, layers: list[int], table: Table | None, rank: int) -> tuple[Elements, Elements]:
    """What a rank holds of such parameters: in blocks, and outside of them."""
    blocks = others = Elements()
    model, ranges = job.model, stage_ranges(layers)
    if table is None or model.adapter is not None or not model.trains_decoder:
        return blocks, others
    for stage in table.stages_of(rank):
        place = stage % len(layers)
        first, last = place == 0, place == len(layers) - 1
        if stage >= len(layers):
            blocks += stage_elements(job, ranges[place], first=False, last=False, trained=True)
            others += stage_elements(job, range(0), first=first, last=last, trained=True)
        elif last and (model.tied or model.extra_tokens):
            others += Elements(model.vocab_size * model.width / job.layout.tp)
    return blocks, others
