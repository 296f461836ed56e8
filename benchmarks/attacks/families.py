"""All families of the attack, in the order of the table."""

from attacks.case import Family
from attacks.command_lines import COMMAND_LINES
from attacks.hugging_face import HUGGING_FACE
from attacks.job_files import JOB_FILES
from attacks.shell_strings import SHELL_STRINGS

FAMILIES: list[Family] = [
    COMMAND_LINES,
    JOB_FILES,
    HUGGING_FACE,
    SHELL_STRINGS,
]
