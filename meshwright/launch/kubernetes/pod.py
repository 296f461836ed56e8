"""The pod of one node: the command that starts its ranks, its GPUs, and the disks it shares with the others."""

from typing import Any

from meshwright.launch.kubernetes.request import Request
from meshwright.python_process import python_command

CONTAINER = "meshwright"
JOB_FILE = "/etc/meshwright/job.toml"
PORT = 29500
"""Where the nodes meet; every pod has its own address, so that nothing else can use it."""
Table = dict[str, Any]


def labels(request: Request) -> dict[str, str]:
    """The labels of everything that belongs to a run."""
    return {"app.kubernetes.io/name": "meshwright", "app.kubernetes.io/instance": request.name}


def metadata(request: Request, name: str | None = None) -> Table:
    """Name, namespace and labels of an object."""
    place = {"namespace": request.namespace} if request.namespace else {}
    queue = {"kueue.x-k8s.io/queue-name": request.settings.queue} if request.settings.queue and name is None else {}
    return {"name": name or request.name, **place, "labels": {**labels(request), **queue}}


def train_command(request: Request, node_rank: str, alone: bool) -> list[str]:
    """The words that run a node's ranks; Kubernetes replaces $(NAME), so no shell comes between it and its SIGTERM.

    With `alone` the launcher for one machine is used, which restarts ranks and watches for hangs by itself.
    """
    words = python_command("-m", "meshwright", python=plain(request.site.python or "python"))
    words += ["train", JOB_FILE, "--resume"]
    words += ["--set", plain(f"run.folder={request.run}"), "--nproc", str(request.shape.ranks_per_node)]
    if alone:
        return words
    return [
        *words,
        *("--nodes", str(request.shape.nodes)),
        *("--node-rank", node_rank),
        *("--master", "$(MASTER_ADDR):$(MASTER_PORT)"),
    ]


def plain(text: str) -> str:
    """Text in which Kubernetes replaces nothing."""
    return text.replace("$", "$$")


def pod(request: Request, container: Table, restart: str | None = None, ranks: bool = True) -> Table:
    """A pod template around one container, whose own keys are given; without `ranks` it requests nothing."""
    settings = request.settings
    spec: Table = {
        # With a process of Kubernetes as number 1, SIGTERM ends a launcher that is not ready to handle it yet, and
        # what a killed rank leaves is reaped.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": request.grace_s,
        "containers": [
            {
                "name": CONTAINER,
                "image": request.image,
                "workingDir": settings.mount,
                **container,
                "env": [*_variables(request), *container.get("env", [])],
                **_secret(request),
                **(_resources(request) if ranks else {}),
                "volumeMounts": [
                    {"name": "job", "mountPath": JOB_FILE.rpartition("/")[0], "readOnly": True},
                    {"name": "shared", "mountPath": settings.mount},
                    {"name": "shm", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "job", "configMap": {"name": f"{request.name}-job"}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": request.volume}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # data workers and NCCL need more than 64 MiB
        ],
    }
    if restart is not None:
        spec["restartPolicy"] = restart
    if settings.service_account:
        spec["serviceAccountName"] = settings.service_account
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    if request.gpus and ranks:
        spec["tolerations"] = [{"key": settings.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": {"labels": labels(request)}, "spec": spec}


def variable(name: str, value: str) -> dict[str, str]:
    """One variable of a container."""
    return {"name": name, "value": plain(value)}


def _variables(request: Request) -> list[dict[str, str]]:
    """Caches of data and of Hugging Face belong on the volume: the first node fills them for all."""
    given = {"XDG_CACHE_HOME": f"{request.settings.mount}/.cache", "PYTHONUNBUFFERED": "1", **request.site.environment}
    return [variable(name, value) for name, value in given.items()]


def _secret(request: Request) -> Table:
    secret = request.settings.secret
    return {"envFrom": [{"secretRef": {"name": secret}}]} if secret else {}


def _resources(request: Request) -> Table:
    asked: dict[str, str | int] = {}
    if request.site.cpus_per_gpu is not None:
        asked["cpu"] = request.site.cpus_per_gpu * request.shape.ranks_per_node
    asked |= request.settings.resources
    limits: dict[str, str | int] = {name: value for name, value in asked.items() if "/" in name}
    if request.gpus:
        limits[request.settings.gpu_resource] = request.gpus
    requests = {name: value for name, value in asked.items() if "/" not in name}
    given = {"requests": {**requests, **limits}, "limits": limits}  # what has a vendor must be the same in both
    return {"resources": {name: values for name, values in given.items() if values}} if requests or limits else {}
