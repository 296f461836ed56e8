"""The fields of a multimodal sample: pictures, film and sound, and how each becomes items of one size."""

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, PositiveInt, ValidationError

from meshwright.job.audio import FRAMES_PER_SECOND, Audio
from meshwright.job.encoder import Encoder
from meshwright.job.section import Section
from meshwright.job.vision import Vision

if TYPE_CHECKING:
    from meshwright.job.data import Data

MOST_FIELDS = 16
_KINDS = {"vision": ("image", "video"), "audio": ("audio",)}
"""Kinds of fields that an encoder reads."""
_LEFT_OUT = {"vision": "size and tokens", "audio": "mels, seconds and tokens"}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_Mean = Annotated[float, Field(ge=-1000, le=1000)]
_Deviation = Annotated[float, Field(gt=0, le=1000)]


class MediaField(Section):
    """One field of a sample; an item is a picture, a frame of a film, or a window of sound."""

    kind: Literal["image", "video", "audio"]
    """What the field holds."""
    tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    """Tokens that one item takes in a sequence; by default those of the model's encoder."""
    size: Annotated[int, Field(ge=1, le=8192)] | None = None
    """image and video: height and width of an item in pixels; by default model.vision.image_size."""
    column: str | None = Field(default=None, min_length=1)
    """The key of JSON, the column of a table or the ending of a tar's members that holds it; by default the field's
    name (or with an s), and in a tar every member of the kind."""
    folder: str | None = Field(default=None, min_length=1)
    """Where paths in JSON and tables begin; by default the folder of the file that names them."""
    placeholder: int | None = Field(default=None, ge=0, lt=1 << 24)
    """The token in the item's places; by default that of the tokenizer's `<name>`, else its end of text."""
    crop: Literal["center", "random", "squash"] = "center"
    """image and video: `center` keeps the middle square, `random` a random part in training (keyed by seed and sample),
    `squash` stretches the whole to a square."""
    flip: bool = False
    """image and video: mirror half of the items in training, keyed likewise."""
    mean: tuple[_Mean, _Mean, _Mean] = (0.5, 0.5, 0.5)
    """image and video: subtracted from red, green and blue (0 … 1)."""
    std: tuple[_Deviation, _Deviation, _Deviation] = (0.5, 0.5, 0.5)
    """image and video: what red, green and blue are divided by after that."""
    max_pixels: PositiveInt = Field(default=50_000_000, le=1 << 30)
    """image and video: a larger picture or frame counts as damaged, by its header, before it is decoded."""
    frames: PositiveInt = Field(default=8, le=4096)
    """video: frames taken from a film at equal distances, each an item."""
    rate: int = Field(default=16000, ge=1000, le=192_000)
    """audio: samples per second after resampling."""
    mels: PositiveInt = Field(default=80, le=512)
    """audio: bands of the log-mel features; by default model.audio.mels if there is one."""
    seconds: float = Field(default=30.0, gt=0, le=600)
    """audio: length of a window, the last of which is filled up with silence; by default model.audio.seconds if there
    is one."""
    windows: PositiveInt = Field(default=1, le=4096)
    """audio: at most so many windows of a sound; what is longer is cut. By default model.audio.windows if there is
    one."""

    @property
    def most_items(self) -> int:
        """Items that one picture, film or sound becomes at most."""
        return {"image": 1, "video": self.frames, "audio": self.windows}[self.kind]

    @property
    def item_shape(self) -> tuple[int, ...]:
        """Channels, height and width of a picture; mels and frames of sound (one every hundredth of a second)."""
        if self.kind == "audio":
            return (self.mels, round(self.seconds * FRAMES_PER_SECOND))
        assert self.size is not None
        return (3, self.size, self.size)


class ItemPlan(NamedTuple):
    """What the items of a job have in common."""

    shape: tuple[int, ...]
    tokens: int
    """Tokens that each takes."""
    slots: int
    """Items per sequence."""


def item_plan(data: "Data", sequence_length: int) -> ItemPlan | None:
    """The size, tokens and slots of a job's items; None where samples are text alone.

    Without data.items_per_sequence there are as many slots as items could ever fill a sequence.
    """
    if not data.fields:
        return None
    field = next(iter(data.fields.values()))
    assert field.tokens is not None
    return ItemPlan(field.item_shape, field.tokens, data.items_per_sequence or max(1, sequence_length // field.tokens))


def complete_fields(table: dict[str, Any]) -> None:
    """Give fields of a job's tables what the model's encoder reads where they say nothing of their own: the size of an
    item, its tokens, its colours, and slots."""
    data, read = table.get("data"), _encoder_of(table.get("model", {}))
    if read is None or not isinstance(data, dict) or not isinstance(fields := data.get("fields"), dict):
        return
    data.setdefault("items_per_sequence", read.slots)
    own: dict[str, Any] = {"tokens": read.tokens, "placeholder": read.placeholder}
    if isinstance(read, Vision):
        own |= {"size": read.image_size, "mean": read.colours[0], "std": read.colours[1]}
    elif isinstance(read, Audio):
        own |= {"mels": read.mels, "seconds": read.seconds, "windows": read.windows}
    for field in fields.values():
        if isinstance(field, dict) and field.get("kind") in _KINDS[read.section]:
            for name, value in own.items():
                if value is not None:
                    field.setdefault(name, value)


def _encoder_of(model: Any) -> Encoder | None:
    """The encoder of a table; none if it has none, or one that is refused with the rest of the job."""
    sections: dict[str, type[Encoder]] = {"vision": Vision, "audio": Audio}
    for section, kind in sections.items():
        if isinstance(model, dict) and isinstance(given := model.get(section), dict):
            try:
                return kind.model_validate(given)
            except ValidationError:
                return None
    return None


def require_read(encoder: Encoder, data: "Data") -> None:
    """Refuse items that a model's encoder does not read."""
    section = f"model.{encoder.section}"
    for name, field in data.fields.items():
        if field.kind not in _KINDS[encoder.section]:
            raise ValueError(
                f'data.fields.{name}.kind = "{field.kind}", but {section} reads {encoder.items}; leave out one of them'
            )
        if (field.item_shape, field.tokens) != (encoder.item_shape, encoder.tokens):
            raise ValueError(
                f"data.fields.{name} has items of {_words(field.item_shape)} in {field.tokens} tokens, but {section} "
                f"reads {_words(encoder.item_shape)} in {encoder.tokens}; leave {_LEFT_OUT[encoder.section]} out"
            )
    if data.fields and data.items_per_sequence != encoder.slots:
        raise ValueError(
            f"data.items_per_sequence = {data.items_per_sequence} differs from {section}.{encoder.slots_field} = "
            f"{encoder.slots}; leave it out"
        )


def require_fields(data: "Data") -> None:
    """Refuse fields that cannot be read together, or not with the rest of the section."""
    for name, field in data.fields.items():
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"data.fields.{name}: a field's name is its placeholder <{name}> in the text; use small letters, "
                "digits and _"
            )
        if field.kind != "audio" and field.size is None:
            raise ValueError(f"data.fields.{name}.size is not set; give the height and width of an item in pixels")
        if field.tokens is None:
            raise ValueError(f"data.fields.{name}.tokens is not set; give the tokens that one item takes")
    if len(data.fields) > MOST_FIELDS:
        raise ValueError(f"data.fields has {len(data.fields)} fields; at most {MOST_FIELDS} are supported")
    alike = {(field.item_shape, field.tokens): name for name, field in data.fields.items()}
    if len(alike) > 1:
        (shape, tokens), (other_shape, other_tokens) = list(alike)[:2]
        one, other = list(alike.values())[:2]
        raise ValueError(
            f"data.fields.{one} has items of {_words(shape)} in {tokens} tokens and data.fields.{other} of "
            f"{_words(other_shape)} in {other_tokens}; give all fields of a job the same item"
        )
    beside = {
        "data.stream = true": data.stream,
        'data.format = "preferences"': data.format == "preferences",
        'data.packing = "concatenate", which would cut items apart': data.packing == "concatenate",
        "data.mask_documents = false": not data.mask_documents,
    }
    if wrong := next((words for words, there in beside.items() if there), None):
        raise ValueError(f"data.fields does not support {wrong}; leave one of them out")


def _words(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
