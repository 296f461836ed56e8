"""All families of the attack, in the order of the table."""

from attacks.case import Family
from attacks.checkpoint_files import CHECKPOINT_FILES
from attacks.command_lines import COMMAND_LINES
from attacks.requests import SERVER_REQUESTS
from attacks.run_files import RUN_FILES

FAMILIES: list[Family] = [
    COMMAND_LINES,
    RUN_FILES,
    CHECKPOINT_FILES,
    SERVER_REQUESTS,
]
