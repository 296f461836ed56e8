"""Items checked while samples are prepared: read, decoded once if asked for, counted; damaged ones are named."""

from collections.abc import Sequence

from meshwright.data.media.damage import Damaged
from meshwright.data.media.files import MediaFiles, SourceFile
from meshwright.data.media.film import check_film
from meshwright.data.media.pictures import check_picture
from meshwright.data.media.sound import count_windows
from meshwright.data.raw import Bad, MediaTaking, Medium, Text
from meshwright.errors import UserError
from meshwright.job.fields import MediaField

MISSING = "without its file"


class Examiner:
    """Looks at the items of samples; files are given by their number among all inputs."""

    def __init__(self, taking: MediaTaking, inputs: Sequence[str]) -> None:
        self._fields: Sequence[tuple[str, MediaField]] = taking.media
        self._decode = taking.check == "decode"
        self._inputs = inputs
        self._files = MediaFiles()

    def look(self, text: Text) -> Text | Bad:
        """The sample with what its items become, or what is wrong with one of them."""
        media = []
        for medium in text.media:
            name, field = self._fields[medium.field]
            try:
                raw = self.read(text, medium)
            except FileNotFoundError:
                return Bad(f"{name} {MISSING}", f"{text.where or medium.name} ({medium.name})")
            except (OSError, UserError) as error:
                if not medium.named:
                    raise
                return Bad(f"{name} {MISSING}", f"{medium.name} ({error})")
            try:
                count = items_in(raw, field, self._decode)
            except Damaged as error:
                return Bad(f"{name} {error.kind}", f"{medium.name} ({error})")
            media.append(medium._replace(items=count, size=len(raw)))
        return text._replace(media=tuple(media))

    def read(self, text: Text, medium: Medium) -> bytes:
        """The bytes of an item."""
        if medium.data is not None:
            return medium.data
        if medium.named:
            return self._files.read_whole(medium.name)
        file = text.file if medium.file is None else medium.file
        assert file is not None
        return self._files.read(SourceFile(self._inputs[file]), medium.offset, medium.size)


def items_in(raw: bytes, field: MediaField, decode: bool) -> int:
    """Items that some bytes become; `Damaged` where they are of no use."""
    if field.kind == "image":
        check_picture(raw, field, decode)
        return 1
    if field.kind == "video":
        check_film(raw, field, decode)
        return field.frames
    return count_windows(raw, field)
