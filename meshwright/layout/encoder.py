"""What a layout may be for a model with an encoder of pictures or sound, and whether that is recomputed."""

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Segments
from meshwright.job.encoder import Encoder


def recomputes_encoder(job: Job) -> bool:
    """Whether the blocks of the encoder keep only their inputs: where all blocks of the decoder do. What is not trained
    keeps nothing anyway."""
    encoder, asked = job.model.encoder, job.memory.recompute
    return encoder is not None and "encoder" in encoder.train and (asked == "full" or isinstance(asked, Segments))


def require_encoder_layout(job: Job) -> None:
    """Refuse what an encoder on the first stage cannot do, and pictures or sound without an encoder."""
    encoder = job.model.encoder
    if encoder is None and job.data.fields:
        section = "audio" if next(iter(job.data.fields.values())).kind == "audio" else "vision"
        raise UserError(
            f"data.fields has {', '.join(job.data.fields)}, but model.{section}, which would read it, is not set; set "
            "it or leave data.fields out"
        )
    if encoder is None:
        return
    section = f"model.{encoder.section}"
    _require_tensor(job, encoder)
    if job.layout.pp > 1 and job.layout.schedule == "pipedream":
        raise UserError(
            f'layout.schedule = "pipedream" is not supported with {section} yet; set layout.schedule = "1f1b"'
        )
    if job.layout.compress != "none":
        raise UserError(
            f'layout.compress = "{job.layout.compress}" is not supported with {section} yet; set it to "none"'
        )
    if job.precision.format == "fp8" and "decoder" not in encoder.train:
        raise UserError(
            f'precision.compute = "fp8" rounds products whose weights {section}.train leaves as they are; set '
            'precision.compute = "bf16" or add "decoder"'
        )
    if encoder.slots * encoder.tokens > job.batch.sequence_length:
        raise UserError(
            f"{section}.{encoder.slots_field} = {encoder.slots} of {encoder.tokens} tokens each do not fit into "
            f"batch.sequence_length = {job.batch.sequence_length}; lengthen the sequence or lower it"
        )


def _require_tensor(job: Job, encoder: Encoder) -> None:
    tp, section = job.layout.tp, encoder.section
    sizes = {f"{section}.heads": encoder.heads, f"{section}.ffn_width": encoder.ffn_width, "width": job.model.width}
    for field, size in sizes.items():
        if size % tp:
            raise UserError(
                f"layout.tp = {tp} does not divide model.{field} = {size}, which it shards with the encoder; lower "
                "layout.tp"
            )
