"""A task file for SkyPilot: the job inside it, and a command that starts a node's ranks by SkyPilot's variables."""

import shlex
from typing import Any

from meshwright.errors import UserError
from meshwright.launch.kubernetes import Request
from meshwright.python_process import python_command

_END = "END_OF_JOB"
_JOB = "~/.meshwright/job.toml"
_PORT = 29500


def sky_task(request: Request) -> dict[str, Any]:
    """The task: nodes, GPUs, the shared volume, and what every node runs."""
    task: dict[str, Any] = {"name": request.name, "num_nodes": request.shape.nodes, "resources": _resources(request)}
    variables = dict(request.site.environment)
    if request.volume is not None:
        mount = request.settings.mount
        task["volumes"] = {mount: request.volume}
        variables = {"XDG_CACHE_HOME": f"{mount}/.cache", **variables}
    task["envs"] = variables
    task["run"] = _script(request)
    return {name: value for name, value in task.items() if value}


def _resources(request: Request) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    if request.gpus:
        if request.site.gpu is None:
            raise UserError("SkyPilot needs the name of the GPU; set cluster.gpu, e.g. --set cluster.gpu=h100")
        resources["accelerators"] = f"{request.site.gpu.upper()}:{request.gpus}"
    if request.image is not None:
        resources["image_id"] = f"docker:{request.image}"
    return resources


def _script(request: Request) -> str:
    """What every node runs; the nodes meet at the first address that SkyPilot lists."""
    if _END in request.job.splitlines():
        raise UserError(f"the job file has a line {_END}, which ends it in a task file; remove that line")
    # Without a volume relative paths begin in the home folder, which this node has for itself.
    folder = shlex.quote(request.run) if request.volume else f'"$HOME"/{shlex.quote(_below(request))}'
    python = shlex.join(python_command("-m", "meshwright", python=request.site.python or "python"))
    start = f"exec {python} train {_JOB} --resume --set run.folder="
    words = [f"{start}{folder} --nproc {request.shape.ranks_per_node}"]
    if request.shape.nodes > 1:
        words.append('--nodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK"')
        words.append(f'--master "$(head -n 1 <<<"$SKYPILOT_NODE_IPS"):{_PORT}"')
    home = shlex.quote(request.settings.mount) if request.volume else '"$HOME"'
    lines = [
        f"mkdir -p ~/.meshwright && cat >{_JOB} <<'{_END}'",
        request.job.rstrip("\n"),
        _END,
        f"cd {home}",
        " \\\n  ".join(words),
    ]
    return "\n".join(lines) + "\n"


def _below(request: Request) -> str:
    return request.run.removeprefix(request.settings.mount).lstrip("/")
