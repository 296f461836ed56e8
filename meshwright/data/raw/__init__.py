"""Documents out of files of any kind, wherever they lie: listing, reading, and what is wrong with some of them."""

from meshwright.data.raw.bad import BadDocuments
from meshwright.data.raw.inputs import InputFile, Inputs, list_inputs
from meshwright.data.raw.items import Bad, Item, Medium, Taking, Text
from meshwright.data.raw.local import SYNTHETIC
from meshwright.data.raw.media import MediaTaking
from meshwright.data.raw.reading import in_parts, read_unit
from meshwright.data.raw.units import Piece, Unit, plan_units

__all__ = [
    "SYNTHETIC",
    "Bad",
    "BadDocuments",
    "InputFile",
    "Inputs",
    "Item",
    "MediaTaking",
    "Medium",
    "Piece",
    "Taking",
    "Text",
    "Unit",
    "in_parts",
    "list_inputs",
    "plan_units",
    "read_unit",
]
