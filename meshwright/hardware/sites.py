"""Sites: what a planner, a batch script and a manifest need of each; unpublished facts are absent and must be given."""

import re
import tomllib
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
)

from meshwright.errors import UserError
from meshwright.hardware.gpus import gpu_by_key
from meshwright.hardware.profile_files import profile_of
from meshwright.job.reading import read_settings_text, reason, toml_table
from meshwright.job.sanitize import odd_character

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Asked = Literal["account", "qos", "partition", "time"]


def _require_plain(value: Any) -> None:
    parts = [*value, *value.values()] if isinstance(value, dict) else [value] if isinstance(value, str) else value
    for part in parts if isinstance(parts, list | tuple) else ():
        if isinstance(part, str) and (odd := odd_character(part)):
            raise ValueError(f"it must not contain the control character {odd}")


class Kubernetes(BaseModel):
    """What a manifest for Kubernetes needs of a cluster, in your own profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["jobset", "pytorchjob", "rayjob"] = "jobset"
    """What a run becomes: a JobSet, a PyTorchJob of the Kubeflow training operator, or a RayJob of KubeRay."""
    namespace: str | None = None
    """The namespace; by default kubectl's."""
    image: str | None = None
    """A container image that has meshwright."""
    volume: str | None = None
    """A PersistentVolumeClaim that every pod mounts: run folders, data and caches are on it."""
    mount: str = Field(default="/mnt/meshwright", pattern=r"^/[^:]+$")
    """Where the volume is mounted; relative paths of a job begin there."""
    secret: str | None = None
    """A Secret whose keys become environment variables: credentials are never in a manifest."""
    service_account: str | None = None
    """The service account of the pods."""
    queue: str | None = None
    """A Kueue LocalQueue."""
    gpu_resource: str = "nvidia.com/gpu"
    """How the cluster counts its GPUs."""
    resources: dict[str, str | PositiveInt] = {}
    """Further resources that every pod requests, such as `memory = "512Gi"` or `"rdma/ib" = 8`."""
    node_selector: dict[str, str] = {}
    """Labels that a pod's machine must have."""

    @field_validator("*")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        _require_plain(value)
        return value


class Site(BaseModel):
    """One GPU partition of one site; None or empty is unknown, never a guess."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Its name for `--site`, `--cluster` and `cluster.name`."""
    title: str
    """The machine, its partition and its country."""
    gpu: str | None = None
    """Its GPU, as the table of GPUs names it; None is a partition without any."""
    gpus_per_node: PositiveInt
    """Devices in one machine, as Slurm and torch count them; without a GPU, the ranks a machine takes."""
    nodes: PositiveInt | None = None
    """Machines of the partition."""
    host_memory_gib: PositiveFloat | None = None
    """Memory of one machine."""
    interconnect: str | None = None
    """The network between machines."""
    network_gb_s: PositiveFloat | None = None
    """Its bandwidth for one machine in one direction, GB/s."""
    gpu_watts: PositiveFloat | None = None
    """Power of one GPU under load, if measured there."""
    pue: float | None = Field(default=None, ge=1.0)
    """Energy of the whole site over that of its computers."""
    co2_g_per_kwh: NonNegativeFloat | None = None
    """CO₂ of its electricity."""
    internet: bool | None = None
    """Whether compute nodes reach the internet."""
    partition: str | None = None
    """Slurm's partition."""
    qos: str | None = None
    """Slurm's quality of service, where one is open to everybody."""
    max_time: str | None = None
    """The longest job, as Slurm writes it."""
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How its scripts request GPUs."""
    cpus_per_gpu: PositiveInt | None = None
    """Cores for each GPU; None requests whole machines."""
    directives: tuple[str, ...] = ()
    """Further options for sbatch, such as `--constraint=thin`."""
    asks: tuple[Asked, ...] = ()
    """Options that every job must give and no profile can know."""
    account: str | None = None
    """The project to charge; in your own profile."""
    time: str | None = None
    """A job's time limit without --time; in your own profile."""
    modules: tuple[str, ...] = ()
    """Loaded before anything starts."""
    environment: dict[str, str] = {}
    """Variables set before anything starts."""
    container_command: str | None = None
    """The command that runs a program inside an image, such as `apptainer exec --nv`."""
    python: str | None = None
    """The Python that has meshwright on the compute nodes; by default the one that submits."""
    kubernetes: Kubernetes | None = None
    """What runs on Kubernetes need; in your own profile."""
    sources: dict[str, str] = {}
    """The source of each fact: its field → a page or document."""

    @field_validator("*")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        """All of it ends up in batch scripts, a word or a line each."""
        _require_plain(value)
        return value

    @field_validator("environment")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        if wrong := [name for name in value if not _VARIABLE.fullmatch(name)]:
            raise ValueError(f"{wrong[0]!r} is not a variable name")
        return value


# Our own settings, not facts about a site.
_NO_FACTS = {"name", "title", "sources", "asks", "account", "time", "modules", "environment", "python", "kubernetes"}


@cache
def site_names() -> tuple[str, ...]:
    """The name of every site that comes with the package."""
    entries = (entry.name for entry in files("meshwright.hardware").joinpath("sites").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml")))


@cache
def known_sites() -> dict[str, Site]:
    """Every site that comes with the package, by name."""
    folder = files("meshwright.hardware").joinpath("sites")
    texts = {name: folder.joinpath(f"{name}.toml").read_text("utf-8") for name in site_names()}
    return {name: _site(name, tomllib.loads(text)) for name, text in texts.items()}


def find_site(name: str, field: str = "--site") -> Site:
    """A site by name, or your own profile file, which may say `extends = "leonardo"` and what differs.

    Errors name `field`, where it was given.
    """
    if name.lower() in known_sites():
        return known_sites()[name.lower()]
    path = Path(name)
    if path.is_file():
        return _own_site(path, field)
    near = get_close_matches(name.lower(), known_sites(), n=3, cutoff=0.5) or list(known_sites())
    raise UserError(f"{field} = {name} is neither a known site nor a profile file; use one of {', '.join(near)}")


def unsourced(site: Site) -> list[str]:
    """The facts of a site without a source."""
    given = site.model_dump(exclude_defaults=True)
    return sorted(set(given) - _NO_FACTS - set(site.sources))


def _own_site(path: Path, field: str) -> Site:
    try:
        table = toml_table(read_settings_text(path, f"give {field} a site's name or a profile file"))
    except ValueError as error:
        raise UserError(f"{field} = {path} is not valid TOML: {reason(error)}") from None
    base = table.pop("extends", None)
    if base is not None:
        if not isinstance(base, str) or base not in known_sites():
            raise UserError(f"{path}: extends = {base!r} is not a known site; use one of {', '.join(known_sites())}")
        table = {**known_sites()[base].model_dump(exclude={"name"}, exclude_defaults=True), **table}
    table.setdefault("title", path.stem)
    return _site(path.stem, table, str(path))


def _site(name: str, table: dict[str, Any], where: str | None = None) -> Site:
    where = where or f"site {name}"
    try:
        site = Site.model_validate({"name": name, **table})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"{where}: {field} is not allowed or missing ({first['msg'].lower()}); fix the profile"
        ) from None
    if site.gpu is not None and profile_of(site.gpu) is None:
        gpu_by_key(site.gpu)
    return site
