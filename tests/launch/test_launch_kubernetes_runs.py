"""Runs on Kubernetes through the command line: applied, their state in a word, logs, cancelled, and what fails.

kubectl is `fake_kubectl.sh`, and the test writes what a cluster's controllers would: no real cluster is involved.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

SMALL = str(Path(__file__).parents[1] / "small.toml")
SUBMIT = ["submit", SMALL, "--on", "kubernetes", "--container", "i", "--volume", "v", "--set", "run.folder=runs/two"]
JOB_SET = "jobsets.jobset.x-k8s.io.two.json"


class Cluster:
    """What the stand-in knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def calls(self) -> list[list[str]]:
        return [line.split("\x1f")[:-1] for line in (self.folder / "calls").read_text().split("\n")[:-1]]

    def objects(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.json"))

    def fail(self, verb: str, text: str) -> None:
        (self.folder / f"fail-{verb}").write_text(text)

    def set_status(self, file: str = JOB_SET, **status: Any) -> None:
        found = json.loads((self.folder / file).read_text())
        (self.folder / file).write_text(json.dumps({**found, "status": status}))

    def set_pod(
        self,
        number: int,
        phase: str,
        container: dict[str, Any] | None = None,
        labels: dict[str, str] | None = None,
        **status: Any,
    ) -> None:
        index = {"batch.kubernetes.io/job-completion-index": str(number)}
        about = {"name": f"two-node-0-{number}-x", "labels": labels or index}
        state = [] if container is None else [container]
        pod = {
            "metadata": about,
            "spec": {"nodeName": f"machine{number}", "containers": [{"name": "meshwright", "command": ["python"]}]},
            "status": {"phase": phase, "containerStatuses": state, **status},
        }
        (self.folder / f"pod.{number}.json").write_text(json.dumps(pod) + "\n")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    folder = tmp_path / "cluster"
    folder.mkdir()
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.symlink_to(Path(__file__).parent / "fake_kubectl.sh")
    monkeypatch.setenv("PATH", f"{kubectl.parent}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_CLUSTER", str(folder))
    monkeypatch.setenv("FAKE_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return Cluster(folder)


def state_of(cli, run: str = "kubernetes:two") -> tuple[str, str]:
    told = cli("status", run, "--json")
    assert told.code == 0, told
    report = json.loads(told.out)
    return report["state"], report["why"]


def test_submitted_followed_and_cancelled(cli, cluster: Cluster) -> None:
    done = cli(*SUBMIT, "--namespace", "training")
    assert done.code == 0, done
    assert done.out.splitlines() == [
        "submitted jobset/two for /mnt/meshwright/runs/two",
        "see      meshwright status kubernetes:training/two",
    ]
    assert cluster.objects() == ["configmap.two-job.json", JOB_SET]
    run = "kubernetes:training/two"
    assert state_of(cli, run) == ("pending", "no reason given by Kubernetes yet")
    (cluster.folder / "log").write_text("step 1\nstep 2\n")
    cluster.set_pod(0, "Running")
    assert cli("logs", run).out == "step 1\nstep 2\n"
    assert json.loads(cli("logs", run, "--json").out)["files"] == {"rank 0": "step 1\nstep 2\n"}
    ended = cli("cancel", run, "--wait", "5", "--json")
    assert json.loads(ended.out)["state"] == "cancelled", ended
    deleted = ["delete", "jobsets.jobset.x-k8s.io/two", "--ignore-not-found", "--cascade=foreground", "--wait=true"]
    assert ["--namespace", "training", *deleted, "--timeout=5s"] in cluster.calls()
    assert all(call[:2] == ["--namespace", "training"] for call in cluster.calls())
    assert cli(*SUBMIT, "--namespace", "training").code == 0, "to continue"


def test_the_state_in_a_word(cli, cluster: Cluster) -> None:
    assert cli(*SUBMIT).code == 0
    full = {
        "type": "PodScheduled",
        "status": "False",
        "message": "0/3 nodes are available: Insufficient nvidia.com/gpu.",
    }
    cluster.set_pod(0, "Pending", conditions=[full])
    assert state_of(cli) == ("pending", "0/3 nodes are available: Insufficient nvidia.com/gpu.")
    cluster.set_status(restarts=2)
    assert state_of(cli)[0] == "requeued"
    cluster.set_pod(0, "Pending", {"state": {"waiting": {"reason": "ImagePullBackOff"}}})
    assert state_of(cli)[1] == "ImagePullBackOff"
    cluster.set_status(conditions=[{"type": "Suspended", "status": "True", "message": "jobset is suspended"}])
    assert state_of(cli) == ("pending", "jobset is suspended")
    cluster.set_status(conditions=[{"type": "Completed", "status": "True"}])
    assert state_of(cli) == ("done", "all steps are done")
    failed = {"type": "Failed", "status": "True", "message": "jobset failed due to reaching max restarts"}
    cluster.set_status(conditions=[failed])
    assert state_of(cli) == ("failed", "jobset failed due to reaching max restarts")
    cluster.set_pod(0, "Failed", {"state": {"terminated": {"reason": "OOMKilled"}}})
    assert state_of(cli) == ("oom", "a pod ran out of memory; jobset failed due to reaching max restarts")


def test_the_steps_of_a_running_run_are_read_in_its_first_pod(cli, cluster: Cluster, tmp_path: Path) -> None:
    """The pod's volume is a folder here, in which a run has been."""
    site = tmp_path / "site.toml"
    site.write_text(f'gpus_per_node = 1\n[kubernetes]\nmount = "{tmp_path}"\n')
    assert cli(*SUBMIT, "--site", str(site)).code == 0
    cluster.set_pod(0, "Running")
    cluster.set_pod(1, "Running")
    cluster.fail("exec", "error: unable to upgrade connection\n")
    unread = "its steps cannot be read in two-node-0-0-x (kubectl exec failed: unable to upgrade connection; fix"
    assert state_of(cli)[0] == "running" and state_of(cli)[1].startswith(unread)
    assert cli("logs", "kubernetes:two", "--rank", "1").code == 2
    inside = ["exec", "two-node-0-0-x", "-c", "meshwright", "--", "python", "-P", "-m", "meshwright"]
    assert cluster.calls()[-1] == [*inside, "logs", f"{tmp_path}/runs/two", "--rank", "1"]
    (cluster.folder / "fail-exec").unlink()
    assert cli("train", SMALL, "--set", "run.folder=runs/two").code == 0
    report = json.loads(cli("status", "kubernetes:two", "--json").out)
    assert (report["state"], report["step"], report["steps"], report["nodes"]) == ("running", 1, 1, "machine0,machine1")


@pytest.mark.parametrize(("kind", "file"), [("pytorchjob", "pytorchjobs.kubeflow.org"), ("rayjob", "rayjobs.ray.io")])
def test_the_other_kinds(cli, cluster: Cluster, kind: str, file: str) -> None:
    assert f"submitted {kind}/two" in cli(*SUBMIT, "--kind", kind).out
    ended = (
        {"jobStatus": "SUCCEEDED"} if kind == "rayjob" else {"conditions": [{"type": "Succeeded", "status": "True"}]}
    )
    assert state_of(cli)[0] == "pending"
    cluster.set_status(f"{file}.two.json", **ended)
    assert state_of(cli)[0] == "done"
    cluster.set_pod(0, "Running", labels={"ray.io/node-type": "head"} if kind == "rayjob" else None)
    cluster.fail("exec", "error: gone")
    assert cli("cancel", "kubernetes:two", "--wait", "5").code == 0
    saved = ["exec", "two-node-0-0-x", "-c", "meshwright", "--", "python", "-P", "-m", "meshwright", "cancel"]
    assert ([*saved, "/mnt/meshwright/runs/two", "--wait", "5"] in cluster.calls()) == (kind == "rayjob")


def test_what_the_cluster_rejects_leaves_nothing(cli, cluster: Cluster) -> None:
    cluster.fail("apply", 'error: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"\n')
    refused = cli(*SUBMIT)
    assert refused.code == 2 and len(refused.err.splitlines()) == 1
    assert 'kubectl apply failed: no matches for kind "JobSet"' in refused.err
    assert cluster.calls()[-1][:3] == ["delete", "jobsets.jobset.x-k8s.io/two", "configmap/two-job"]
    assert cluster.objects() == []


def test_a_run_that_exists_is_not_replaced(cli, cluster: Cluster) -> None:
    assert cli(*SUBMIT).code == 0
    refused = cli(*SUBMIT)
    assert refused.code == 2 and "jobset/two exists already, running or ended; run meshwright cancel" in refused.err
    assert cluster.objects() == ["configmap.two-job.json", JOB_SET]


def test_a_cluster_that_does_not_answer(cli, cluster: Cluster) -> None:
    cluster.fail("get", "The connection to the server 10.0.0.1:6443 was refused\n")
    for words in (SUBMIT, ["status", "kubernetes:two"], ["logs", "kubernetes:two"], ["cancel", "kubernetes:two"]):
        told = cli(*words)
        assert told.code == 2 and "kubectl get failed: The connection to the server 10.0.0.1:6443" in told.err
    assert cluster.objects() == []


@pytest.mark.parametrize("words", [["status"], ["logs"], ["cancel"]])
def test_what_is_no_run_there(cli, cluster: Cluster, words: list[str]) -> None:
    gone = cli(*words, "kubernetes:training/two")
    assert gone.code == 2 and "there is no such run in namespace training" in gone.err
    odd = cli(*words, "kubernetes:--all")
    assert odd.code == 2 and "is not kubernetes:NAMESPACE/NAME" in odd.err


def test_logs_before_there_is_a_pod_and_logs_that_fail(cli, cluster: Cluster) -> None:
    assert cli(*SUBMIT).code == 0
    assert "has no log yet: none of its pods exists" in cli("logs", "kubernetes:two").err
    cluster.set_pod(0, "Pending")
    cluster.fail("logs", "Error from server (BadRequest): container is waiting to start: ContainerCreating\n")
    told = cli("logs", "kubernetes:two", "--follow")
    assert told.code == 2 and "container is waiting to start" in told.err


def test_without_kubectl(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for words in (SUBMIT, ["status", "kubernetes:two"]):
        told = cli(*words)
        assert told.code == 2 and told.err.startswith("meshwright: kubectl is not on this machine; install it")
        assert len(told.err.splitlines()) == 1
    assert cli(*SUBMIT, "--dry-run").out.startswith("# two, by meshwright")
    assert cli(*SUBMIT, "--write", "run.yaml").out.splitlines()[1] == "start    kubectl apply -f run.yaml"
    assert "exists; add --force" in cli(*SUBMIT, "--write", "run.yaml").err
    shown = json.loads(cli(*SUBMIT, "--dry-run", "--json").out)
    assert shown["jobs"] == [] and shown["scripts"]["two.yaml"] == (tmp_path / "run.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--on", "kubernetes", "--time", "1:00"], "--time is not for --on kubernetes; leave it out"),
        (["--on", "sky", "--ladder"], "--ladder is not for --on sky; leave it out"),
        (["--site", "vega", "--volume", "v"], "--volume is not for --on slurm; leave it out"),
        (["--on", "nomad"], "--on nomad is not known; use slurm, ray, kubernetes or sky"),
        (["--on", "sky"], "--on sky makes a task file; add --write task.yaml"),
        (["--on", "sky", "--dry-run", "--kind", "jobset"], "--kind is not for --on sky; leave it out"),
    ],
)
def test_options_of_other_places_are_refused(cli, words: list[str], sentence: str) -> None:
    refused = cli("submit", SMALL, *words)
    assert refused.code == 2 and sentence in refused.err and refused.out == ""


def test_a_run_folder_is_not_submitted(cli) -> None:
    assert cli("train", SMALL).code == 0
    refused = cli("submit", "run", *SUBMIT[2:-2])
    assert refused.code == 2 and "submit the job file again, and the run in its run.folder continues" in refused.err
