"""What is taken from records of a job with data.fields: its fields, its own encoder, a dataset's own description."""

from collections.abc import Mapping, Sequence

from meshwright.data.media.encoder import encoder_fingerprint, load_encoder
from meshwright.data.raw import MediaTaking, Taking
from meshwright.data.raw.energon import energon_sample
from meshwright.data.raw.extras import need
from meshwright.job.fields import MediaField

_MODULES = {"image": ("PIL.Image",), "video": ("PIL.Image", "av"), "audio": ("av",)}


def media_taking(
    base: Taking, fields: Mapping[str, MediaField], encoder: str | None, check: str, sources: Sequence[str]
) -> Taking:
    """The taking of a section with fields; the base itself where there are none."""
    if not fields:
        return base
    for name, field in fields.items():
        for module in _MODULES[field.kind]:
            need(module, f'data.fields.{name} of kind "{field.kind}"')
    own = None if encoder is None else load_encoder(encoder)
    return MediaTaking(
        base.text_field,
        base.key_field,
        base.chat,
        media=tuple(fields.items()),
        cook=getattr(own, "cook", None),
        recipe="" if encoder is None else encoder_fingerprint(encoder),
        check=check,
        energon=energon_sample(sources),
    )
