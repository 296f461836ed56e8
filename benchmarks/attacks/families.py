"""All families of the attack, in the order of the table."""

from attacks.case import Family
from attacks.command_lines import COMMAND_LINES
from attacks.full_disk import FULL_DISK
from attacks.kills import KILLS

FAMILIES: list[Family] = [COMMAND_LINES, KILLS, FULL_DISK]
