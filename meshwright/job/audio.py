"""The [model.audio] section: an encoder of sound whose output takes places among the decoder's tokens."""

from typing import ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from meshwright.job.encoder import Encoder

FRAMES_PER_SECOND = 100
"""Of log-mel features."""
KERNEL = 3
"""Frames that either convolution sees at once."""
STRIDE = 2
"""Frames that become one token: the step of the second convolution."""


class Audio(Encoder):
    """Whisper's encoder (arXiv:2212.04356) of log-mel features and a projector of two layers before the decoder."""

    section: ClassVar[str] = "audio"
    items: ClassVar[str] = "sound"
    slots_field: ClassVar[str] = "windows"
    token_field: ClassVar[str] = "audio_token"
    key_bias: ClassVar[bool] = False
    last_norm: ClassVar[bool] = True

    init_from: str | None = None
    """A folder of a Whisper model in Hugging Face's format: its encoder is what this one starts with, and gives the
    sizes; by default weights are random."""
    mels: PositiveInt = Field(default=80, le=512)
    """Bands of the log-mel features."""
    seconds: float = Field(default=30.0, ge=0.05, le=600)
    """Length of a window; a token is two hundredths of a second of it. The last window of a sound is filled up with
    silence."""
    windows: PositiveInt = Field(default=1, le=4096)
    """Slots for windows of sound in every sequence; a sound takes as many as it fills, and a slot that is empty takes
    as long as one that is not."""
    audio_token: NonNegativeInt | None = Field(default=None, le=10**8)
    """The token at a window's places, which the encoder's output replaces; only data uses it."""

    @model_validator(mode="after")
    def _waves(self) -> Self:
        if self.width % 2 or self.width < 4:
            raise ValueError(
                f"model.audio.width = {self.width} holds no sines and cosines of two wavelengths; choose an even "
                "number of 4 or more"
            )
        return self

    @property
    def frames(self) -> int:
        """Frames of features in a window."""
        return round(self.seconds * FRAMES_PER_SECOND)

    @property
    def item_shape(self) -> tuple[int, ...]:
        """Bands and frames of a window."""
        return (self.mels, self.frames)

    @property
    def tokens(self) -> int:
        """Places that one window takes."""
        return -(-self.frames // STRIDE)

    @property
    def slots(self) -> int:
        """Windows of a sequence at most."""
        return self.windows

    @property
    def placeholder(self) -> int | None:
        """The token at a window's places."""
        return self.audio_token

    @property
    def activation(self) -> Literal["gelu", "gelu-tanh", "quick-gelu"]:
        """The exact one."""
        return "gelu"
