"""Samples joined by key: the text and the items of the others behind those of the first source."""

import json

from meshwright.data.join import BETWEEN, Joined
from meshwright.data.raw import Bad, Medium, Text
from meshwright.data.raw.bad import EMPTY
from meshwright.data.raw.media import unmarked
from meshwright.errors import UserError


def kept_text(text: Text, files_before: int) -> str:
    """A sample as it is kept until it is joined: its text, and where its items are among all inputs."""
    if held := next((medium for medium in text.media if not (medium.named or medium.located)), None):
        raise UserError(
            f"{held.name} is in a compressed file or a table, from which data.join cannot take items of other sources "
            "than the first; list that source first, or unpack it"
        )
    file = None if text.file is None else text.file + files_before
    media = [medium._replace(data=None, file=None if medium.named else file) for medium in text.media]
    return json.dumps([text.text, media])


def follow_media(joined: Joined, text: Text) -> Text | Bad:
    """A sample with what belongs to it, in the order of the sources; one without any text is of no use."""
    written, media = text.text, list(text.media)
    for kept in joined.texts(text.key) if text.key is not None else ():
        more, items = json.loads(kept)
        written += BETWEEN + more
        media += [Medium(*item) for item in items]
    plain = unmarked(written)
    if not plain.strip():
        return Bad(EMPTY, text.where)
    marks = ((0, len(written) + 1),)
    return text._replace(text=written, media=tuple(media), marks=marks, size_bytes=len(plain.encode("utf-8")))
