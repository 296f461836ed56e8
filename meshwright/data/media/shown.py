"""Pictures shown in a prompt: decoded as a job's field declares, and placed where the text names them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshwright.data.media.carried import CarriedMedia
from meshwright.data.media.chance import Chance
from meshwright.data.media.damage import Damaged
from meshwright.data.media.files import MediaFiles
from meshwright.data.media.items import ItemMaker
from meshwright.data.media.tokens import placeholder_of
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import UserError
from meshwright.job.data import Data
from meshwright.job.fields import MediaField
from meshwright.job.vision import Vision
from meshwright.model import Media

Encode = Callable[[str], list[int]]


class Viewer:
    """Makes what a model reads of pictures and of a text that refers to them. N pictures, T tokens of each."""

    def __init__(self, vision: Vision, data: Data | None, source: str) -> None:
        """By the first field of the run's data that holds pictures or film, of which a picture is one frame; without
        such a field by what the model's own section says."""
        mean, std = vision.colours
        own = MediaField(
            kind="image",
            size=vision.image_size,
            tokens=vision.tokens,
            mean=mean,
            std=std,
            placeholder=vision.image_token,
        )
        fields = {} if data is None else {name: one for name, one in data.fields.items() if one.kind != "audio"}
        self._name, self._field = next(iter(fields.items()), ("image", own))
        self._field = self._field.model_copy(update={"kind": "image"})
        self._maker = ItemMaker(Data(fields={self._name: self._field}))
        self._files = MediaFiles()
        self._encoder, self._source = None if data is None else data.encoder, source

    @property
    def placeholder(self) -> str:
        """What stands for a picture in a text."""
        return f"<{self._name}>"

    def named(self, text: str, pictures: int) -> str:
        """The text with a placeholder for every picture: those that it has, or all before it."""
        found = text.count(self.placeholder)
        if found == 0:
            return self.placeholder * pictures + text
        if found != pictures:
            raise UserError(
                f"the prompt has {found} {self.placeholder} and --image names {pictures} pictures; give one for each, "
                f"or leave {self.placeholder} out to have them first"
            )
        return text

    def look(self, files: Sequence[Path]) -> Tensor:
        """The pictures in files, decoded and normalised (N, channels, size, size); without random crops."""
        if self._encoder is not None:
            raise UserError(
                f"{self._source} makes its pictures with data.encoder = {self._encoder}, code that is not run here; "
                "ask a run without one"
            )
        items = []
        for file in files:
            try:
                items.append(self._maker.make(0, self._files.read_whole(str(file)), Chance(None))[0])
            except OSError as error:
                raise UserError(f"--image {file} cannot be read ({error.strerror}); correct the path") from error
            except Damaged as error:
                raise UserError(f"--image {file} {error}; give a picture that can be decoded") from error
        items_NK = torch.stack([torch.from_numpy(item) for item in items])[:, None]
        filled = torch.zeros(len(items), 1, 1, dtype=torch.int64)
        return CarriedMedia(items_NK, filled, self._maker.scale).arrived().items_BK[:, 0]

    def encode(
        self, tokenizer: Tokenizer, text: str, pictures: int, first: Encode, rest: Encode
    ) -> tuple[list[int], Tensor]:
        """The tokens of a text, its parts between so many placeholders each by itself as in training, and the places of
        every picture's tokens (N, T)."""
        assert self._field.tokens is not None
        token = placeholder_of(tokenizer, self._name, self._field.placeholder)
        parts = text.split(self.placeholder, pictures)
        tokens, places = first(parts[0]), []
        for part in parts[1:]:
            places.append(torch.arange(len(tokens), len(tokens) + self._field.tokens))
            tokens = [*tokens, *[token] * self._field.tokens, *(rest(part) if part else [])]
        return tokens, torch.stack(places) if places else torch.empty(0, self._field.tokens, dtype=torch.int64)


def shown_media(items_N: Tensor, places_NT: Tensor) -> Media:
    """Pictures of one prompt and their places, as a model takes them."""
    return Media(items_N[None], places_NT[None])
