"""The objects of a run: the job file in a ConfigMap, and what starts its pods and restarts them."""

import shlex
from collections.abc import Callable

from meshwright.launch.kubernetes.pod import JOB_FILE, PORT, Table, metadata, pod, train_command, variable
from meshwright.launch.kubernetes.request import Request
from meshwright.launch.signals import REQUEUE
from meshwright.python_process import python_command

KIND, FOLDER, STEPS = "meshwright/kind", "meshwright/run-folder", "meshwright/steps"
"""Annotations of the ConfigMap, by which `status` finds everything else."""
_RAY_SCRIPT = "/etc/meshwright/ray.sh"


def manifests(request: Request) -> list[Table]:
    """Everything that is applied, in its order."""
    made: dict[str, Callable[[Request], Table]] = {"jobset": _job_set, "pytorchjob": _pytorch_job, "rayjob": _ray_job}
    return [_config_map(request), made[request.kind](request)]


def _config_map(request: Request) -> Table:
    about = metadata(request, f"{request.name}-job")
    about["annotations"] = {KIND: request.kind, FOLDER: request.run, STEPS: str(request.steps)}
    files = {JOB_FILE: request.job, **({_RAY_SCRIPT: _ray_script(request)} if request.kind == "rayjob" else {})}
    data = {path.rpartition("/")[2]: text for path, text in files.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data}


def _job_set(request: Request) -> Table:
    """A JobSet of one indexed Job: any pod that fails restarts the whole set.

    An interrupted run (exit code 85, or a pod that the cluster took away) restarts without limit, as each start
    continues; other failures up to run.max_restarts times.
    """
    nodes = request.shape.nodes
    command = train_command(request, "$(JOB_COMPLETION_INDEX)", alone=nodes == 1)
    meeting = [variable("MASTER_ADDR", f"{request.name}-node-0-0.{request.name}"), variable("MASTER_PORT", str(PORT))]
    container = {"command": command, "env": meeting if nodes > 1 else []}
    interrupted = [
        {"action": "FailJob", "onExitCodes": {"containerName": "meshwright", "operator": "In", "values": [REQUEUE]}},
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    job = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a pod alone is of no use: the set restarts
        "podFailurePolicy": {"rules": interrupted},
        "template": pod(request, container, restart="Never"),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(request),
        "spec": {
            # The controller makes the headless service, under which pods find the first one before it is ready.
            "network": {"enableDNSHostnames": True, "subdomain": request.name, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": request.restarts,
                "rules": [
                    {
                        "name": "interrupted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pytorch_job(request: Request) -> Table:
    """A PyTorchJob: the operator provides the service, MASTER_ADDR, MASTER_PORT and RANK, the number of the pod."""
    nodes = request.shape.nodes
    container = {
        "name": "pytorch",  # the operator sets its variables in the container of this name
        "command": train_command(request, "$(RANK)", alone=False),
        "ports": [{"name": "pytorchjob-port", "containerPort": PORT}],
    }
    replica = {"restartPolicy": "OnFailure", "template": pod(request, container)}
    replicas = {"Master": {"replicas": 1, **replica}}
    if nodes > 1:
        replicas["Worker"] = {"replicas": nodes - 1, **replica}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata(request),
        "spec": {
            # It counts restarted containers of all pods, whatever ended them.
            "runPolicy": {"backoffLimit": request.restarts * nodes, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _ray_job(request: Request) -> Table:
    """A RayJob: a Ray cluster with one worker pod per node, and a script on its head that waits until the run ends."""
    share = {} if request.gpus else {"num-cpus": str(request.shape.ranks_per_node)}
    worker = {
        "groupName": "node",
        "replicas": request.shape.nodes,
        "minReplicas": request.shape.nodes,
        "maxReplicas": request.shape.nodes,
        "rayStartParams": share,
        "template": pod(request, {"name": "ray-worker"}),
    }
    head = {
        "rayStartParams": {"num-cpus": "0"},  # no ranks there
        "template": pod(request, {"name": "ray-head"}, ranks=False),
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata(request),
        "spec": {
            "entrypoint": f"bash {_RAY_SCRIPT}",  # a file, as its words pass through several shells
            "shutdownAfterJobFinishes": True,
            "backoffLimit": request.restarts,
            "rayClusterSpec": {"headGroupSpec": head, "workerGroupSpecs": [worker]},
        },
    }


def _ray_script(request: Request) -> str:
    """Submit the run to the Ray cluster around it, or continue it there, and wait; fails unless all steps are done."""
    command = shlex.join(python_command("-m", "meshwright", python=request.site.python or "python"))
    trust = " --trust" if request.trust else ""  # of code that the submitted job named, and now the folder names
    lines = [
        f"run={shlex.quote(request.run)}",
        'if [ -e "$run/job.resolved.json" ]; then',
        f'  {command} submit "$run" --on ray{trust} || exit',
        "else",
        f'  {command} submit {JOB_FILE} --on ray --set run.folder="$run" || exit',
        "fi",
        f'{command} logs "$run" --follow',
        f'{command} status "$run"',
        f"""{command} status "$run" --json | grep -q '"state": "done"'""",
    ]
    return "\n".join(lines) + "\n"
