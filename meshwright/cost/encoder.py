"""What an encoder and its projector cost: its blocks are those of a decoder of its sizes."""

from dataclasses import replace

from meshwright.cost.cost import Cost, saved
from meshwright.cost.modules import block_cost, linear_cost, norm_cost
from meshwright.cost.parameters import encoder_shape, encoder_tensors
from meshwright.job import Model
from meshwright.job.audio import KERNEL, Audio
from meshwright.job.encoder import Encoder
from meshwright.job.vision import CHANNELS, Vision

_PLACE = 8
"""Bytes of a place's number."""


def encoder_cost(
    shape: Model, encoder: Encoder, sequences: int, number_bytes: int, *, recomputed: bool = False
) -> Cost:
    """Cost of one training pass over the slots of so many sequences; of `recomputed` blocks only inputs are kept."""
    items = sequences * encoder.slots
    tokens, width = items * encoder.tokens, shape.width
    trained = {part: part in encoder.train for part in ("encoder", "projector")}
    total = Cost(sum(tensor.elements for tensor in encoder_tensors(shape, encoder).values()))
    encoded = _encoded_cost(encoder, items, number_bytes, recomputed=recomputed)
    total += encoded if trained["encoder"] else Cost(0, encoded.forward_flops)
    up, down = linear_cost(tokens, encoder.width, width, False), linear_cost(tokens, width, width, False)
    both = replace(up + down, parameters=0).within("projector")
    if not trained["projector"]:  # products with weights that need no gradient
        both = replace(both, backward_flops=both.backward_flops // 2 if trained["encoder"] else 0)
    elif not trained["encoder"]:
        both = replace(both, backward_flops=both.backward_flops - up.forward_flops)
    total += both
    stream = (tokens * width, number_bytes)
    # The hidden states that tokens are put into have a row more, for those without a place.
    total += saved(places=(tokens, _PLACE), row=(width, number_bytes))
    if any(trained.values()):
        total += saved(inner=stream).within("projector")
    if trained["projector"]:
        # CLIP's class token is left out of what the encoder returns, which is copied for that.
        total += saved(input=(tokens * encoder.width, number_bytes), activated=stream).within("projector")
    return total


def _encoded_cost(encoder: Encoder, items: int, number_bytes: int, *, recomputed: bool) -> Cost:
    """All before the projector, without counting parameters."""
    sizes = (encoder_shape(encoder), items, encoder.computed, number_bytes)
    total = _entering_cost(encoder, items, number_bytes)
    for layer in range(encoder.used_layers):
        block = block_cost(*sizes, "full" if recomputed else "none")
        if encoder.activation == "quick-gelu" and not recomputed:  # it keeps a sigmoid, too
            sigmoid = (items * encoder.computed * encoder.ffn_width, number_bytes)
            block += saved(sigmoid=sigmoid).within("ffn")
        total += block.within(f"layers.{layer}")
    if encoder.last_norm:
        total += norm_cost(*sizes).within("post_norm")
    return replace(total, parameters=0)


def _entering_cost(encoder: Encoder, items: int, number_bytes: int) -> Cost:
    """What makes tokens of items, which need no gradient themselves."""
    width, tokens = encoder.width, items * encoder.tokens
    if isinstance(encoder, Audio):
        frames = items * encoder.frames
        first = linear_cost(frames, KERNEL * encoder.mels, width, False)
        return (
            replace(first, backward_flops=first.forward_flops)
            + linear_cost(tokens, KERNEL * width, width, False)
            + saved(
                features=(frames * encoder.mels, number_bytes),
                first=(frames * width, number_bytes),
                activated=(frames * width, number_bytes),
                second=(tokens * width, number_bytes),
            )
        )
    assert isinstance(encoder, Vision)
    pixels = CHANNELS * encoder.patch**2
    patch = linear_cost(tokens, pixels, width, False)
    total = replace(patch, backward_flops=patch.forward_flops) + saved(patches=(tokens * pixels, number_bytes))
    if encoder.kind == "clip":
        total += norm_cost(encoder_shape(encoder), items, encoder.computed, number_bytes).within("pre_norm")
    return total
