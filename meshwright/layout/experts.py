"""Rules of expert parallelism: which degrees fit the experts and the ranks."""

from math import gcd

from meshwright.errors import UserError
from meshwright.job import Job


def expert_ranks(job: Job) -> int:
    """The ranks that one copy of the experts is distributed over: those that have different tokens."""
    layout = job.layout
    return layout.tp * (layout.dp_shard * layout.cp if layout.zero_stage else 1)


def require_experts(job: Job) -> None:
    """Refuse a layout that does not divide the experts, or their tokens."""
    layout, experts = job.layout, job.model.experts
    if experts is None:
        if layout.ep > 1:
            raise UserError(
                f"layout.ep = {layout.ep} distributes experts, but the model has none; set it to 1 or add model.experts"
            )
        return
    require_router(job)
    if experts.count % layout.ep:
        raise UserError(
            f"layout.ep = {layout.ep} does not divide model.experts.count = {experts.count}; "
            f"{_degrees(gcd(experts.count, expert_ranks(job)))}"
        )
    if (ranks := expert_ranks(job)) % layout.ep:
        of = "dp_shard · cp · tp" if layout.zero_stage else "tp (with layout.zero = 0)"
        raise UserError(
            f"layout.ep = {layout.ep} does not divide layout.{of} = {ranks}; {_degrees(gcd(experts.count, ranks))}"
        )
    if layout.tp > 1:
        _require_tensor_parallel(job, experts.shared_width)
    if experts.balance_rate and layout.pp > 1 and layout.schedule == "pipedream":
        raise UserError(
            f"model.experts.balance_rate = {experts.balance_rate:g} is applied once a step by all stages, which "
            'layout.schedule = "pipedream" does not have; set it to 0 or layout.schedule = "1f1b"'
        )


def require_router(job: Job) -> None:
    """Refuse a router that the loss could not train: a single weight divided by itself is 1, whatever its score."""
    model, experts = job.model, job.model.experts
    if experts is None or not experts.normalised or experts.top_k > 1 or experts.count == 1 or experts.force_balance:
        return
    if model.adapter is None and (model.encoder is None or "decoder" in model.encoder.train):
        raise UserError(
            "model.experts.top_k = 1 with model.experts.normalised = true makes every weight of an expert 1, so that "
            "the loss gives the router no gradient; set model.experts.normalised = false, or top_k = 2 or more"
        )


def _require_tensor_parallel(job: Job, shared_width: int) -> None:
    tp, length = job.layout.tp, job.batch.sequence_length // job.layout.cp
    if shared_width % tp:
        raise UserError(
            f"layout.tp = {tp} does not divide model.experts.shared_width = {shared_width}; set layout.tp to a divisor"
        )
    if length % tp:
        share = " / layout.cp" if job.layout.cp > 1 else ""
        raise UserError(
            f"layout.tp = {tp} does not divide batch.sequence_length{share} = {length}, whose tokens its ranks share "
            "among the experts; set layout.tp to a divisor"
        )


def _degrees(most: int) -> str:
    fitting = [str(degree) for degree in range(1, min(most, 4096) + 1) if most % degree == 0]
    return f"set it to {'one of ' * (len(fitting) > 1)}{', '.join(fitting)}"
