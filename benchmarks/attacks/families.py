"""All families of the attack, in the order of the table."""

from attacks.case import Family
from attacks.command_lines import COMMAND_LINES

FAMILIES: list[Family] = [COMMAND_LINES]
