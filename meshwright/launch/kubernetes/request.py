"""What a run asks of a Kubernetes cluster: what can be rejected is rejected here, before there is a manifest."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from meshwright.errors import UserError
from meshwright.hardware import Kubernetes, Site, find_site
from meshwright.job import LoadedJob, code_of
from meshwright.job.sanitize import odd_character, secret_in, without_secrets
from meshwright.launch.slurm import Shape
from meshwright.launch.slurm.submit import shape_of
from meshwright.layout import ranks_of
from meshwright.runs.lifecycle import run_path

KINDS = ("jobset", "pytorchjob", "rayjob")
SKY = "sky"
"""Not an object of a cluster, but a task for SkyPilot, which needs the same."""
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_OBJECT = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_CREDENTIAL = re.compile(r"token|secret|passw|credential|(api|access|private)_?key", re.IGNORECASE)
_LONGEST = {"jobset": 63 - len("-node-0-"), "pytorchjob": 63 - len("-worker-"), "rayjob": 47, SKY: 63}
"""How long a run's name may be, less the digits of its last node: the pods' host names are made of it."""


@dataclass(frozen=True)
class Request:
    """A run on Kubernetes, complete."""

    name: str
    kind: str
    run: str
    """The run's folder, as the pods see it."""
    job: str
    """The job file's text."""
    steps: int
    restarts: int
    """How many crashes do not end it."""
    trust: bool
    """Whether the job names code."""
    shape: Shape
    gpus: int
    """GPUs per node; 0 for a job on CPUs."""
    image: str | None
    volume: str | None
    namespace: str | None
    grace_s: int
    """Seconds between SIGTERM and the kill: for the current step and a checkpoint."""
    site: Site
    settings: Kubernetes

    @property
    def reference(self) -> str:
        """The run's name for `meshwright status`, `logs` and `cancel`."""
        return f"kubernetes:{self.namespace}/{self.name}" if self.namespace else f"kubernetes:{self.name}"


def request_of(
    loaded: LoadedJob,
    site: str | None = None,
    kind: str | None = None,
    namespace: str | None = None,
    image: str | None = None,
    volume: str | None = None,
    grace_s: int = 300,
) -> Request:
    """The request with the profile's settings filled in; raises if a required value is in neither."""
    if loaded.from_run:
        raise UserError(
            "a run folder cannot be submitted to Kubernetes, whose pods have folders of their own; submit the job file "
            "again, and the run in its run.folder continues"
        )
    machines = _machines(loaded, site)
    settings = machines.kubernetes or Kubernetes()
    kind = kind or settings.kind
    if kind not in (*KINDS, SKY):
        raise UserError(f"--kind = {kind} is not known; use one of {', '.join(KINDS)}")
    shape = shape_of(loaded, machines)
    run = _run(loaded, settings.mount)
    _require_plain_variables(machines)
    image, volume = image or settings.image, volume or settings.volume
    namespace = namespace or settings.namespace
    if kind != SKY:
        _require(image, "--container", "image", "a container image that has meshwright")
    if kind != SKY or shape.nodes > 1:
        _require(volume, "--volume", "volume", "a volume for the run folder that all nodes share")
    _require_name(volume, "--volume", _OBJECT)
    _require_name(namespace, "--namespace", _LABEL)
    return Request(
        name=_name(run, kind, shape),
        kind=kind,
        run=run,
        job=without_secrets(loaded.merged or loaded.raw),
        steps=loaded.job.run.steps,
        restarts=loaded.job.run.max_restarts,
        trust=bool(code_of(loaded.job)),
        shape=shape,
        gpus=0 if loaded.job.run.device == "cpu" else shape.ranks_per_node,
        image=image,
        volume=volume,
        namespace=namespace,
        grace_s=grace_s,
        site=machines,
        settings=settings,
    )


def _machines(loaded: LoadedJob, site: str | None) -> Site:
    """The site, or the machines that the job's own [cluster] describes."""
    if named := site or loaded.job.cluster.name:
        return find_site(named, "--site" if site else "cluster.name")
    cluster, ranks = loaded.job.cluster, ranks_of(loaded.job.layout)
    if "gpus_per_node" not in cluster.model_fields_set and ranks > 1:
        raise UserError(
            f"cluster.gpus_per_node is not set, so it is unknown how many of the layout's {ranks} ranks share a node; "
            "add --set cluster.gpus_per_node=8, or --site with a profile"
        )
    return Site(name="kubernetes", title="Kubernetes", gpus_per_node=cluster.gpus_per_node, gpu=cluster.gpu)


def _require(value: str | None, option: str, field: str, what: str) -> None:
    if not value:
        raise UserError(f"the pods need {option}, {what}; give it, or set kubernetes.{field} in a profile")
    if odd := odd_character(value):
        raise UserError(f"{option} = {value!r} contains the control character {odd}; choose another")


def _require_name(value: str | None, option: str, pattern: re.Pattern[str]) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise UserError(f"{option} = {value!r} is not a name in Kubernetes; give the name that kubectl shows")


def _run(loaded: LoadedJob, mount: str) -> str:
    """The run's folder in the pods: on the volume, where relative paths begin."""
    path = PurePosixPath(mount) / str(run_path(loaded))
    if not path.is_relative_to(mount) or ".." in path.parts:
        raise UserError(
            f"run.folder = {path} is not on the shared volume, which pods mount at {mount}; give a path below it, or a "
            "relative one"
        )
    return str(path)


def _name(run: str, kind: str, shape: Shape) -> str:
    """The run's name in Kubernetes: its folder's, in the letters that a host name may have."""
    name = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(run).name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}".strip("-")
    longest = _LONGEST[kind] - len(str(shape.nodes - 1))
    if len(name) > longest:
        raise UserError(
            f"run.folder = {run} gives the name {name} of {len(name)} characters, and the pods' host names leave room "
            f"for {longest}; choose a shorter folder name"
        )
    return name


def _require_plain_variables(site: Site) -> None:
    """Reject credentials in a profile's environment: whoever may read the pods could read them."""
    for name, value in site.environment.items():
        if _CREDENTIAL.search(name) or secret_in(value):
            raise UserError(
                f"environment.{name} of {site.name} looks like a credential, which a manifest must not contain; put it "
                "in a Secret of the cluster and name that in kubernetes.secret"
            )
