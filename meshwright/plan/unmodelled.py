"""What a job asks for that a prediction does not account for, in words for its answer."""

from meshwright.job import Job


def not_modelled(job: Job, *, on_cpu: bool = False) -> tuple[str, ...]:
    """The settings that change a run, but not the prediction, each with what is missing."""
    layout, found = job.layout, []
    if layout.compress != "none":
        found.append(f"layout.compress = {layout.compress}: neither its smaller messages nor the work of compressing")
    if layout.prefetch > 1 and layout.zero_stage == 3 and layout.dp_shard * layout.cp > 1:
        found.append(f"layout.prefetch = {layout.prefetch}: its memory is counted, but it is as fast as prefetch = 1")
    if layout.async_tp:
        found.append(
            "layout.async_tp = true: neither the buffers of its pieces nor the copies that put products together"
        )
    if job.model.file is not None:
        found.append(f"model.file = {job.model.file}: predicted as the built-in model of the same sizes")
    if job.data.mask_documents and not on_cpu:  # there a mask has its price
        found.append("data.mask_documents = true: attention is counted over whole sequences")
    if (encoder := job.model.encoder) is not None:
        what = f"model.{encoder.section}: decoding and loading of {encoder.items}"
        found.append(f"{what}; every slot is counted as full")
    if job.prefers and job.preference.needs_reference:
        found.append(f'preference.loss = "{job.preference.loss}": the pass of the start weights before the first step')
    if job.model.experts is not None and job.model.experts.capacity is not None:
        capacity = f"model.experts.capacity = {job.model.experts.capacity:g}"
        found.append(f"{capacity}: rows are counted as without it, neither dropped nor padded")
    return tuple(found)
