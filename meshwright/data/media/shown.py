"""Pictures, films and sounds in a prompt: decoded as a job's fields declare, and placed where the text names them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.data.media.carried import CarriedMedia
from meshwright.data.media.chance import Chance
from meshwright.data.media.damage import DAMAGED, Damaged
from meshwright.data.media.files import MediaFiles
from meshwright.data.media.items import ItemMaker
from meshwright.data.media.tokens import placeholder_of
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.tones import RATE, TONES
from meshwright.errors import UserError
from meshwright.job.audio import Audio
from meshwright.job.data import Data
from meshwright.job.encoder import Encoder
from meshwright.job.fields import MediaField
from meshwright.job.vision import Vision
from meshwright.model import Media

Encode = Callable[[str], list[int]]
Seen = Mapping[str, Sequence[Tensor]]
"""By a field's name what each file became: some items."""
_THINGS = {"image": ("picture", "pictures"), "video": ("film", "films"), "audio": ("sound", "sounds")}
"""Kinds of fields, which options are named after, and what their files hold."""
_KINDS = {"vision": ("video", "image"), "audio": ("audio",)}


@dataclass(frozen=True)
class Shown:
    """Files that belong to a prompt."""

    images: Sequence[Path] = ()
    videos: Sequence[Path] = ()
    audio: Sequence[Path] = ()

    @property
    def by_kind(self) -> dict[str, Sequence[Path]]:
        """The files for each kind of field that there are files for."""
        given = {"image": self.images, "video": self.videos, "audio": self.audio}
        return {kind: files for kind, files in given.items() if files}


NOTHING = Shown()


class Viewer:
    """Makes what a model reads of files and of a text that refers to them. T tokens of an item."""

    def __init__(self, encoder: Encoder | None, data: Data | None, source: str) -> None:
        """Files are read by the first field of their kind in the run's data; without one, pictures are read as frames
        of film, and pictures and sound by what the model's own section says."""
        fields = {} if data is None else data.fields
        self._fields: dict[str, tuple[str, MediaField]] = {}
        for kind in () if encoder is None else _KINDS[encoder.section]:
            declared = next(((name, field) for name, field in fields.items() if field.kind == kind), None)
            if declared is not None:
                self._fields[kind] = declared
        if isinstance(encoder, Vision) and "image" not in self._fields:
            name, field = self._fields.get("video", ("image", _own_picture(encoder)))
            self._fields["image"] = name, field.model_copy(update={"kind": "image"})
        if isinstance(encoder, Audio) and not self._fields:
            self._fields["audio"] = "audio", _own_sound(encoder, data)
        self._files = MediaFiles()
        self._own, self._source = None if data is None else data.encoder, source

    def named(self, text: str, shown: Shown) -> str:
        """The text with a placeholder for every file: those that it has, or all before it."""
        before = ""
        for name in dict.fromkeys(name for name, _ in self._fields.values()):
            files = {kind: len(shown.by_kind.get(kind, ())) for kind, own in self._fields.items() if own[0] == name}
            found, wanted = text.count(f"<{name}>"), sum(files.values())
            if found not in (0, wanted):
                given = " and ".join(f"--{kind} names {count} {_THINGS[kind][1]}" for kind, count in files.items())
                raise UserError(
                    f"the prompt has {found} <{name}> and {given}; give one for each, or leave <{name}> out to have "
                    "them first"
                )
            before += f"<{name}>" * (wanted - found)
        return before + text

    def look(self, shown: Shown) -> Seen:
        """What is in the files, decoded and normalised, without random crops; refuses what the model does not read."""
        if shown.by_kind and self._own is not None:
            raise UserError(
                f"{self._source} makes its items with data.encoder = {self._own}, code that is not run here; ask a "
                "run without one"
            )
        seen: dict[str, list[Tensor]] = {}
        for kind, files in shown.by_kind.items():
            if kind not in self._fields:
                raise UserError(
                    f"{self._source} has learned from no {_THINGS[kind][1]}, since none of its data.fields is of kind "
                    f'"{kind}"; leave out --{kind}'
                )
            name, field = self._fields[kind]
            maker = ItemMaker(Data(fields={name: field}))
            seen.setdefault(name, []).extend(self._items(maker, kind, file) for file in files)
        return seen

    def _items(self, maker: ItemMaker, kind: str, file: Path) -> Tensor:
        try:
            made = maker.make(0, self._files.read_whole(str(file)), Chance(None))
        except OSError as error:
            raise UserError(f"--{kind} {file} cannot be read ({error.strerror}); correct the path") from error
        except Damaged as error:
            why = f"cannot be decoded ({error})" if error.kind == DAMAGED else str(error)
            raise UserError(f"--{kind} {file} {why}; give another {_THINGS[kind][0]}") from error
        filled = torch.zeros(1, len(made), 1, dtype=torch.int64)
        return CarriedMedia(torch.from_numpy(made)[None], filled, maker.scale).arrived().items_BK[0]

    def encode(
        self, tokenizer: Tokenizer, text: str, seen: Seen, first: Encode, rest: Encode
    ) -> tuple[list[int], Media | None]:
        """The tokens of a text, its parts between placeholders each by itself as in training, and the items that stand
        there."""
        left = {name: list(items) for name, items in seen.items()}
        names = re.compile("|".join(f"<{name}>" for name in left)) if left else re.compile(r"(?!)")
        tokens, places, items, encode, begin = list[int](), list[Tensor](), list[Tensor](), first, 0
        fields = dict(self._fields.values())
        for match in names.finditer(text):
            name = match[0][1:-1]
            if not left[name]:
                continue  # a later mention, as by the model itself
            part, begin = text[begin : match.start()], match.end()
            tokens, encode = [*tokens, *(encode(part) if part or encode is first else [])], rest
            items.append(left[name].pop(0))
            each = fields[name].tokens
            assert each is not None
            count = len(items[-1]) * each
            places.append(torch.arange(len(tokens), len(tokens) + count).view(-1, each))
            tokens += [placeholder_of(tokenizer, name, fields[name].placeholder)] * count
        part = text[begin:]
        tokens = [*tokens, *(encode(part) if part or not items else [])]
        return tokens, Media(torch.cat(items)[None], torch.cat(places)[None]) if items else None


def _own_picture(vision: Vision) -> MediaField:
    mean, std = vision.colours
    own = {"size": vision.image_size, "tokens": vision.tokens, "placeholder": vision.image_token}
    return MediaField(kind="image", mean=mean, std=std, **own)


def _own_sound(audio: Audio, data: Data | None) -> MediaField:
    own = {"mels": audio.mels, "seconds": audio.seconds, "windows": audio.windows, "tokens": audio.tokens}
    if data is not None and TONES in data.sources:
        own["rate"] = RATE
    return MediaField(kind="audio", placeholder=audio.audio_token, **own)
