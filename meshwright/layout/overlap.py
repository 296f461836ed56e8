"""What asynchronous tensor parallelism needs, checked before any process starts."""

from meshwright.errors import UserError
from meshwright.job import Job


def require_async_tensor(job: Job) -> None:
    """Refuse it where there are no messages that the compiler could put beside products."""
    if not job.layout.async_tp:
        return
    asked, off = "layout.async_tp = true", "set layout.async_tp = false"
    if job.layout.tp == 1:
        raise UserError(f"{asked} hides the messages of tensor parallelism, but layout.tp = 1; raise it or {off}")
    if not job.layout.sp:
        raise UserError(
            f"{asked} cuts messages along the sequence, but layout.sp = false; set layout.sp = true or {off}"
        )
    if job.run.compile is False:
        raise UserError(f"{asked} is the compiler's work, but run.compile = false; set run.compile = true or {off}")
    if job.precision.format == "fp8":
        raise UserError(
            f'{asked} is not verified with products in precision.compute = "fp8", which are rounded after the message; '
            f'set precision.compute = "bf16" or {off}'
        )
