"""Code that a job names: the job's author decides what runs, so a job from a run folder needs the user's consent."""

from meshwright.errors import UserError
from meshwright.job.job import Job


def code_of(job: Job) -> dict[str, str]:
    """The fields of a job whose files are executed, with their values in words."""
    code = {}
    if job.model.file is not None:
        code["model.file"] = f'model.file = "{job.model.file}"'
    if job.data.encoder is not None:
        code["data.encoder"] = f'data.encoder = "{job.data.encoder}"'
    if _may_compile(job) and job.data.cache is not None:
        code["data.cache"] = f'data.cache = "{job.data.cache}", from which run.compile loads compiled code'
    return code


def _may_compile(job: Job) -> bool:
    """Whether blocks are compiled, or would be on some machine: auto does not on a CPU, but for what needs it."""
    return job.run.compile is True or (job.run.compile == "auto" and (job.run.device != "cpu" or job.layout.async_tp))


def require_trust(job: Job, folder: str, named_elsewhere: frozenset[str] = frozenset()) -> None:
    """Refuse to run code that only a run folder names; fields given on the command line are the user's own."""
    if code := [words for field, words in code_of(job).items() if field not in named_elsewhere]:
        raise UserError(f"{folder} names {code[0]}, which is code that would be run; read it, then add --trust")
