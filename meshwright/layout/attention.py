"""Rules of attention kinds that not every layout supports."""

from meshwright.errors import UserError
from meshwright.job import Job


def require_attention(job: Job) -> None:
    """Refuse a layout that the model's attention does not support."""
    layout, model = job.layout, job.model
    if layout.tp > 1 and model.qk_norm and model.qk_norm_over == "width" and model.kv_heads % layout.tp:
        raise UserError(
            f"layout.tp = {layout.tp} does not divide model.kv_heads = {model.kv_heads}, and model.qk_norm_over = "
            '"width" needs every key head once; set layout.tp to a divisor'
        )
