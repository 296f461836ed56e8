"""The [model.vision] section: an encoder of pictures whose output takes places among the decoder's tokens."""

from typing import ClassVar, Literal, Self

from pydantic import Field, NegativeInt, NonNegativeInt, PositiveInt, model_validator

from meshwright.job.encoder import Encoder

CLIP_COLOURS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CHANNELS = 3
"""Of a picture."""


class Vision(Encoder):
    """A vision transformer and a projector of two layers before the decoder, as in LLaVA (arXiv:2304.08485)."""

    section: ClassVar[str] = "vision"
    items: ClassVar[str] = "pictures"
    slots_field: ClassVar[str] = "images"
    token_field: ClassVar[str] = "image_token"

    kind: Literal["clip", "siglip"] = "siglip"
    """The encoder as Hugging Face folders have it: CLIP has a class token, a norm before the first block and the quick
    GELU, SigLIP the tanh-approximated one."""
    image_size: PositiveInt = Field(default=224, le=10**4)
    """Height and width of a picture in pixels; the data delivers it in this size."""
    patch: PositiveInt = Field(default=16, le=10**4)
    """Height and width of a patch in pixels; each is one token."""
    select_layer: NegativeInt = Field(default=-1, ge=-(10**3))
    """The block whose result the projector gets, counted from the end: -1 is the last, -2 (LLaVA) the one before. Later
    ones are not computed."""
    images: PositiveInt = Field(default=1, le=10**4)
    """Slots for pictures in every sequence; a slot that is empty takes as long as one that is not."""
    image_token: NonNegativeInt | None = Field(default=None, le=10**8)
    """The token at a picture's places, which the encoder's output replaces; only data and Hugging Face files use it."""

    @property
    def colours(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of red, green and blue that the encoder is trained with."""
        return CLIP_COLOURS if self.kind == "clip" else HALVES

    @property
    def item_shape(self) -> tuple[int, ...]:
        """Channels, height and width of a picture."""
        return (CHANNELS, self.image_size, self.image_size)

    @property
    def tokens(self) -> int:
        """Places that one picture takes."""
        return (self.image_size // self.patch) ** 2

    @property
    def slots(self) -> int:
        """Pictures of a sequence at most."""
        return self.images

    @property
    def placeholder(self) -> int | None:
        """The token at a picture's places."""
        return self.image_token

    @property
    def activation(self) -> Literal["gelu", "gelu-tanh", "quick-gelu"]:
        """CLIP's by a sigmoid, SigLIP's by tanh."""
        return "quick-gelu" if self.kind == "clip" else "gelu-tanh"

    @property
    def used_layers(self) -> int:
        """Blocks that are computed."""
        return self.layers + self.select_layer + 1

    @property
    def computed(self) -> int:
        """Tokens of a picture inside the encoder: CLIP's class token is one of them."""
        return self.tokens + (self.kind == "clip")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.image_size % self.patch:
            raise ValueError(
                f"model.vision.patch = {self.patch} does not divide model.vision.image_size = {self.image_size}; "
                "choose a divisor of it"
            )
        if self.used_layers < 1:
            raise ValueError(
                f"model.vision.select_layer = {self.select_layer} selects none of model.vision.layers = {self.layers}; "
                "raise it"
            )
        return self
