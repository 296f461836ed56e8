"""All families of the attack, in the order of the table."""

from attacks.case import Family
from attacks.command_lines import COMMAND_LINES
from attacks.shell_strings import SHELL_STRINGS

FAMILIES: list[Family] = [
    COMMAND_LINES,
    SHELL_STRINGS,
]
