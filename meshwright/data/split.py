"""Which part of the text is held out for validation: whole documents, or where there are few the end of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.data.hashing import fraction_of
from meshwright.data.raw import Bad, Item, Taking, Unit, read_unit

_KEY = 0x5EED_0F_5417
_FEW_DOCUMENTS = 20


@dataclass(frozen=True)
class HeldOut:
    """The rule of one input, whose documents are numbered from its beginning to its end."""

    fraction: float
    ends: bool = False
    """Whether the end of every document is held out, and no whole one."""

    def whole(self, number: int) -> bool:
        """Whether the document with this number is one of validation's."""
        return not self.ends and fraction_of(number, _KEY) < self.fraction

    def end_of(self, tokens: int) -> int:
        """How many of a document's tokens, its last ones, are validation's."""
        return int(tokens * self.fraction) if self.ends else 0


def rule_for(units: Sequence[Unit], firsts: Sequence[int], taking: Taking, fraction: float) -> HeldOut:
    """Whole documents where there are at least twenty and one of them falls to validation, else their ends.

    The end of a conversation without its beginning would be no test of anything, so those stay whole, and so do samples
    with pictures. Reads no further
    than needed to know.
    """
    by_document = HeldOut(fraction)
    if fraction == 0 or taking.whole:
        return by_document
    seen, found = 0, False
    for unit, first in zip(units, firsts, strict=True):
        numbers = (number for number, _ in enumerate(_good(documents_begun(unit, taking)), start=first))
        for number in numbers:
            seen, found = seen + 1, found or by_document.whole(number)
            if found and seen >= _FEW_DOCUMENTS:
                return by_document
    return replace(by_document, ends=True)


def documents_begun(unit: Unit, taking: Taking) -> Iterator[Item]:
    """The first piece of every document that begins in a unit, and what cannot be used."""
    for piece in unit.pieces:
        for item in read_unit(replace(unit, pieces=(piece,)), taking):
            if isinstance(item, Bad) or item.begins:
                yield item
            if piece.file.format == "text" and not isinstance(item, Bad):
                break  # a text file is one document, whose rest need not be read to count it


def _good(items: Iterator[Item]) -> Iterator[Item]:
    return (item for item in items if not isinstance(item, Bad))
