"""`meshwright submit --on kubernetes` and `--on sky`, and the state and logs of a run on Kubernetes."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.job import LoadedJob

PLACES = ("kubernetes", "sky")


@dataclass(frozen=True)
class Asked:
    """What the command line says about the pods and their manifest."""

    kind: str | None
    namespace: str | None
    volume: str | None
    write: Path | None
    force: bool


def submit(
    on: str,
    loaded: "LoadedJob",
    asked: Asked,
    site: str | None,
    image: str | None,
    grace_s: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Print, write or apply what starts a job there."""
    from meshwright.cli.output import print_json, require_new, write_file
    from meshwright.errors import UserError
    from meshwright.launch.kubernetes import manifests, request_of, yaml_text
    from meshwright.launch.kubernetes import submit as apply
    from meshwright.launch.sky import sky_task
    from meshwright.version import VERSION

    sky, write = on == "sky", asked.write
    require_new(write, "--write", asked.force)
    if sky and write is None and not dry_run:
        raise UserError("--on sky makes a task file; add --write task.yaml, and start it with sky launch task.yaml")
    kind = "sky" if sky else asked.kind
    request = request_of(loaded, site, kind, asked.namespace, image, asked.volume, grace_s)
    documents = [sky_task(request)] if sky else manifests(request)
    text = yaml_text(documents, f"{request.name}, by meshwright {VERSION}")
    if write is not None:
        write_file(write, text, "--write")
    jobs = [apply(request, text)] if write is None and not dry_run else []
    run = request.reference if jobs else request.run
    if as_json:
        print_json({"run": run, "jobs": jobs, "scripts": {str(write or f"{request.name}.yaml"): text}})
    elif jobs:
        print(f"submitted {jobs[0]} for {request.run}\nsee      meshwright status {run}")
    elif write is not None:
        command = "sky launch" if sky else "kubectl apply -f"
        print(f"wrote    {write} for {run}\nstart    {command} {shlex.quote(str(write))}")
    else:
        print(text, end="")


def reference(run: Path | None) -> str | None:
    """A run on Kubernetes, as `submit` printed it; None for a run folder."""
    return str(run) if str(run).startswith("kubernetes:") else None


def print_logs(run: str, rank: int | None, follow: bool, as_json: bool) -> None:
    """What a run's pods wrote."""
    from meshwright.cli.output import print_json, print_written
    from meshwright.errors import UserError
    from meshwright.launch.kubernetes import logs

    if as_json and follow:
        raise UserError("--json prints one document and cannot follow; leave out --json or --follow")
    if as_json:
        print_json({"run": run, "files": {f"rank {rank or 0}": "".join(logs(run, rank, follow))}})
        return
    for line in logs(run, rank, follow):
        print_written(line, end="")
