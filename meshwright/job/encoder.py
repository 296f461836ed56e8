"""What encoders of pictures and of sound have in common: their vectors take places among tokens."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from meshwright.job.section import Section

if TYPE_CHECKING:
    from meshwright.job.model import Model

Part = Literal["encoder", "projector", "decoder"]
PARTS: tuple[Part, ...] = ("encoder", "projector", "decoder")
ENCODERS = ("vision", "audio")
"""Sections of [model], each an encoder's; the names of its parameters begin with it."""
OF_TRAINING = ("train", "images", "windows")
"""Fields that are a choice of each training, not of the model."""


class Encoder(Section):
    """A transformer without a causal mask and a projector of two layers before the decoder."""

    section: ClassVar[str]
    """Its name in [model], and the first part of its parameters' names."""
    items: ClassVar[str]
    """What it reads, in a word."""
    slots_field: ClassVar[str]
    """The field that gives the slots of a sequence."""
    token_field: ClassVar[str]
    """The field that gives the token at an item's places."""
    key_bias: ClassVar[bool] = True
    """Whether its keys have a bias."""
    last_norm: ClassVar[bool] = False
    """Whether the norm after the last block is computed, not only a part of a folder's weights."""

    width: PositiveInt = Field(default=768, le=10**5)
    """Size of the encoder's residual stream."""
    layers: PositiveInt = Field(default=12, le=10**3)
    """Blocks of the encoder."""
    heads: PositiveInt = Field(default=12, le=10**4)
    """Attention heads of the encoder."""
    ffn_width: PositiveInt = Field(default=3072, le=10**6)
    """Inner size of its feed-forward; default 4 × width."""
    norm_eps: PositiveFloat = Field(default=1e-5, le=1.0)
    """Added to the variance inside its norms."""
    train: tuple[Part, ...] = Field(default=PARTS, min_length=1)
    """The parts that are trained. The others stay as they are: without gradients, masters or optimizer states, in the
    format of precision.compute."""

    @property
    @abstractmethod
    def item_shape(self) -> tuple[int, ...]:
        """The size of one item."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Places that one item takes."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """Items of a sequence at most."""

    @property
    @abstractmethod
    def placeholder(self) -> int | None:
        """The token at an item's places."""

    @property
    @abstractmethod
    def activation(self) -> Literal["gelu", "gelu-tanh", "quick-gelu"]:
        """Of its feed-forward: the exact GELU, its approximation by tanh, or CLIP's by a sigmoid."""

    @property
    def used_layers(self) -> int:
        """Blocks that are computed."""
        return self.layers

    @property
    def computed(self) -> int:
        """Tokens of an item inside the encoder."""
        return self.tokens

    @field_validator("train", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        """A list from a file: the section around this one has been read, so strict validation knows of no file."""
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        """Fill in ffn_width if not given."""
        if isinstance(values, dict) and isinstance(width := values.get("width"), int) and 0 < width <= 10**5:
            return {"ffn_width": 4 * width} | values
        return values

    @model_validator(mode="after")
    def _whole_heads(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"model.{self.section}.heads = {self.heads} does not divide model.{self.section}.width = {self.width}; "
                "choose a divisor of it"
            )
        return self


def encoder_part(parameter: str) -> Part:
    """The part of a model with an encoder to which a parameter belongs, by its name."""
    section, _, inside = parameter.partition(".")
    if section not in ENCODERS:
        return "decoder"
    return "projector" if inside.startswith("projector.") else "encoder"


def require_encoder(shape: "Model", encoder: Encoder) -> None:
    """Reject what a model with an encoder cannot have."""
    section = f"model.{encoder.section}"
    if shape.vision is not None and shape.audio is not None:
        raise ValueError("model.vision with model.audio is not supported yet; leave one of them out")
    if shape.file is not None:
        raise ValueError(
            f"{section} is for Meshwright's own decoder, but model.file = {shape.file} builds its own; leave one of "
            "them out"
        )
    if shape.extra_tokens:
        raise ValueError(
            f"model.extra_tokens = {shape.extra_tokens} would predict tokens ahead inside {encoder.items}; set it to 0 "
            f"with {section}"
        )
    if shape.adapter is not None:
        raise ValueError(f"model.adapter with {section} is not supported yet; leave one of them out")
    if encoder.placeholder is not None and encoder.placeholder >= shape.vocab_size:
        raise ValueError(
            f"{section}.{encoder.token_field} = {encoder.placeholder} is outside model.vocab_size = "
            f"{shape.vocab_size}; lower it"
        )
