"""All families of the attack, in the order of the table."""

from attacks.archives import ARCHIVES
from attacks.backups import BACKUPS
from attacks.case import Family
from attacks.chat_templates import CHAT_TEMPLATES
from attacks.checkpoint_files import CHECKPOINT_FILES
from attacks.command_lines import COMMAND_LINES
from attacks.dictionaries import DICTIONARIES
from attacks.documents import DOCUMENTS
from attacks.full_disk import FULL_DISK
from attacks.hugging_face import HUGGING_FACE
from attacks.item_paths import ITEM_PATHS
from attacks.job_files import JOB_FILES
from attacks.kills import KILLS
from attacks.media_files import MEDIA_FILES
from attacks.normalizers import NORMALIZERS
from attacks.prepared_data import PREPARED_DATA
from attacks.rehearsals_given import REHEARSALS
from attacks.requests import SERVER_REQUESTS
from attacks.run_files import RUN_FILES
from attacks.shell_strings import SHELL_STRINGS
from attacks.surroundings import SURROUNDINGS
from attacks.tokenizers_given import TOKENIZERS

FAMILIES: list[Family] = [
    COMMAND_LINES,
    JOB_FILES,
    HUGGING_FACE,
    SHELL_STRINGS,
    ARCHIVES,
    DICTIONARIES,
    PREPARED_DATA,
    CHAT_TEMPLATES,
    TOKENIZERS,
    NORMALIZERS,
    DOCUMENTS,
    MEDIA_FILES,
    ITEM_PATHS,
    RUN_FILES,
    REHEARSALS,
    CHECKPOINT_FILES,
    SERVER_REQUESTS,
    SURROUNDINGS,
    KILLS,
    FULL_DISK,
    BACKUPS,
]
