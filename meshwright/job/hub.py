"""Models by their Hugging Face name: the folder of the local cache that holds one, downloaded first if it is not there.

What is in the cache is used as it is, without asking the network. huggingface_hub is imported only for a name.
"""

import fcntl
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from meshwright.errors import UserError
from meshwright.job.presets import require_family_named
from meshwright.reading import Unfit, read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The weights in one file, or the list of the files that hold them."""
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json"),
)
"""Small files next to the weights; with config.json and safetensors all that is ever downloaded."""
Tell = Callable[[str], object]
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class HubName:
    """A model on the Hugging Face hub, and which version of it."""

    repository: str
    revision: str

    def __str__(self) -> str:
        """As it is written in a job."""
        return f"{self.repository}@{self.revision}"

    @property
    def storage(self) -> Path:
        """Its folder in the cache, which HF_HUB_CACHE or HF_HOME places."""
        return Path(_hub().constants.HF_HUB_CACHE) / f"models--{self.repository.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        """The folder of its files, for a revision that is a commit."""
        return self.storage / "snapshots" / self.revision


def hub_name(text: str) -> HubName | None:
    """The name that a text is; None for a folder, and for a text that cannot be a name."""
    found = _NAME.fullmatch(text)
    if found is None or Path(text).exists():
        return None
    return HubName(found[1], found[2] or "main")


def pinned(text: str, field: str) -> str:
    """A name with the commit it stands for, whose config and tokenizer are then in the cache; a folder as it is.

    Errors call the text `field`.
    """
    name = hub_name(text)
    if name is None:
        return text
    if (found := _described(name, "config.json", "tokenizer.json")) is None:
        require_family_named(field, name.repository)
        with _one_at_a_time(name):
            found = _described(name, "config.json", "tokenizer.json") or _fetched_description(name, field)
    return str(found)


def holds_weights(folder: Path) -> bool:
    """Whether a folder has files of weights, complete or not, and of a format that is read or not."""
    return any(file.suffix in (".safetensors", *PICKLES) for file in folder.iterdir())


def folder_of(text: str) -> Path:
    """The folder that a text names: itself, or for a pinned name the one in the cache."""
    name = hub_name(text)
    return Path(text).expanduser() if name is None else name.snapshot


def shadowed(text: str) -> Path | None:
    """The cached model of the same name as a folder, if there is one."""
    found = _NAME.fullmatch(text)
    if found is None or not Path(text).is_dir():
        return None
    try:
        storage = HubName(found[1], "main").storage
    except UserError:  # without huggingface_hub there is no cache
        return None
    return storage if storage.is_dir() else None


def fetch_weights(text: str, field: str, tell: Tell | None = None) -> None:
    """Download the weights of a pinned name unless they are in the cache; of several processes one downloads, and the
    others wait for it. `tell` is called with a line before and after; without it nothing is shown."""
    name = hub_name(text)
    if name is None or _weights(name.snapshot):
        return
    with _one_at_a_time(name):
        if _weights(name.snapshot):
            return
        _download(name, field, ("config.json", *COMPANIONS, INDEX))
        files = _listed(name.snapshot) or [SINGLE]
        if tell is not None:
            tell(f"downloading {name} to {name.snapshot}")
        _download(name, field, files, shown=tell is not None)
        if lost := [file for file in files if not (name.snapshot / file).is_file()]:
            raise UserError(_without_weights(name, field, lost))
        if tell is not None:
            size = sum((name.snapshot / file).stat().st_size for file in files)
            tell(f"downloaded {len(files)} file{'s' * (len(files) > 1)}, {size / 1e9:.2f} GB")


def _hub() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise UserError(
            "a model's Hugging Face name needs the package huggingface_hub; pip install -U huggingface_hub, or give a "
            "folder instead"
        ) from None
    return huggingface_hub


def _described(name: HubName, *files: str) -> HubName | None:
    """The commit in the cache that a name stands for; None if one of these files of it is not there."""
    commits = set()
    for file in files:
        found = _hub().try_to_load_from_cache(name.repository, file, revision=name.revision)
        if not isinstance(found, str):
            return None
        commits.add(Path(found).parent.name)
    return HubName(name.repository, commits.pop())


def _fetched_description(name: HubName, field: str) -> HubName:
    """Download config and tokenizer; without a network a config in the cache is enough."""
    try:
        commit = _download(name, field, ("config.json", *COMPANIONS, INDEX))
    except UserError:
        if (known := _described(name, "config.json")) is None:
            raise
        return known
    if not (commit.snapshot / "config.json").is_file():
        raise UserError(f"{field} has no config.json at revision {name.revision}; give a model of transformers")
    return commit


def _download(name: HubName, field: str, files: Sequence[str], shown: bool = False) -> HubName:
    """Bring these files, as far as they exist, into the cache; an interrupted download continues where it stopped."""
    hub = _hub()
    before = hub.utils.are_progress_bars_disabled()
    if not shown:
        hub.utils.disable_progress_bars()
    try:
        folder = hub.snapshot_download(name.repository, revision=name.revision, allow_patterns=list(files))
    except hub.errors.GatedRepoError as error:
        raise UserError(
            f"{field} is a gated model; accept its terms at {hub.constants.ENDPOINT}/{name.repository}, then run "
            "hf auth login or set HF_TOKEN"
        ) from error
    except hub.errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{field} is neither a folder here nor a public model at {hub.constants.ENDPOINT}; correct it, or run "
            "hf auth login if the model is private"
        ) from error
    except hub.errors.RevisionNotFoundError as error:
        raise UserError(
            f'{field} has no revision "{name.revision}"; give a branch, a tag or a commit that its page lists'
        ) from error
    except Exception as error:  # each release of the library has its own errors of the network
        raise UserError(_unreachable(name, field, error)) from error
    finally:
        if not before:
            hub.utils.enable_progress_bars()
    return HubName(name.repository, Path(folder).name)


def _unreachable(name: HubName, field: str, error: Exception) -> str:
    """Where a model was looked for, why it could not be downloaded, and what to do."""
    constants = _hub().constants
    cached = f"{name.storage} lacks files of it" if name.storage.is_dir() else f"there is no {name.storage}"
    cause = error.__cause__ or error.__context__ or error
    reason = str(cause).strip().partition("\n")[0] or type(cause).__name__
    network = f"{constants.ENDPOINT} did not give it ({reason})"
    if constants.HF_HUB_OFFLINE:
        network = "HF_HUB_OFFLINE forbids to download it"
    return (
        f"{field} is neither a folder here nor in the Hugging Face cache ({cached}), and {network}; run hf download "
        f"{name.repository} where there is a network, set HF_HUB_CACHE to a cache that has it, or give a folder"
    )


def _without_weights(name: HubName, field: str, lost: list[str]) -> str:
    """Why a model has no weights that can be used."""
    try:
        present = _hub().HfApi().list_repo_files(name.repository, revision=name.revision)
    except Exception as error:  # the download above then gave what was in the cache
        return _unreachable(name, field, error)
    if pickles := sorted(file for file in present if Path(file).suffix in PICKLES):
        return (
            f"{field} has weights only as a pickle ({pickles[0]}), which can run code when opened; give a revision or "
            f"another model with safetensors"
        )
    return f"{field} has no {lost[0]} at revision {name.revision}; give a model whose weights are complete"


def _weights(folder: Path) -> bool:
    """Whether a folder holds all files of its weights."""
    files = _listed(folder) or [SINGLE]
    return all((folder / file).is_file() for file in files)


def _listed(folder: Path) -> list[str]:
    """The files that a folder's index lists; none without an index."""
    path = folder / INDEX
    if not path.is_file():
        return []
    try:
        listed = read_object(path.resolve()).get("weight_map")  # files in the cache are links
    except Unfit as unfit:
        raise UserError(f"{path} is damaged ({unfit}); delete it, and it is downloaded again") from None
    files = {str(file) for file in listed.values()} if isinstance(listed, dict) else set()
    return sorted(file for file in files if re.fullmatch(r"[\w.-]+\.safetensors", file, re.ASCII))


@contextmanager
def _one_at_a_time(name: HubName) -> Iterator[None]:
    """One process of those that share the cache downloads a model; the others wait, and then find it."""
    place = name.storage.parent / ".locks" / f"meshwright--{name.storage.name}.lock"
    with ExitStack() as opened:
        with suppress(OSError):  # a cache that cannot be written, or a file system without locks
            place.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(opened.enter_context(place.open("ab")), fcntl.LOCK_EX)
        yield
