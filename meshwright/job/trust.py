"""Code that a job names: whoever wrote the job decides what is run, so a job out of a run folder is asked about."""

from meshwright.errors import UserError
from meshwright.job.job import Job


def code_of(job: Job) -> dict[str, str]:
    """The fields of a job whose files are run, with what is found there, in words."""
    code = {}
    if job.model.file is not None:
        code["model.file"] = f'model.file = "{job.model.file}"'
    if job.run.compile and job.data.cache is not None:
        code["data.cache"] = f'data.cache = "{job.data.cache}", from which run.compile loads what it compiled before'
    return code


def require_trust(job: Job, folder: str, named_elsewhere: frozenset[str] = frozenset()) -> None:
    """Refuse to run what only a run folder names; fields that the command line gave are the user's own."""
    if code := [words for field, words in code_of(job).items() if field not in named_elsewhere]:
        raise UserError(f"{folder} names {code[0]}, and that is code which would be run; read it, then add --trust")
