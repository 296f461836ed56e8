"""Manifests for Kubernetes: what they request, what the published schemas say to them, and what is refused before.

No cluster is involved; schemas/README.md says where the schemas are from.
"""

import copy
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.launch.kubernetes import KINDS, manifests, request_of, yaml_text

SMALL = str(Path(__file__).parents[1] / "small.toml")
SCHEMAS = Path(__file__).parent / "schemas"
CORE = "core-1.31.json"
OF_KIND = {"JobSet": "jobset-v1alpha2.json", "PyTorchJob": "pytorchjob-v1.json", "RayJob": "rayjob-v1.json"}
SITE = """
gpus_per_node = 8
gpu = "h100"
cpus_per_gpu = 12
environment = { NCCL_DEBUG = "WARN", ODD = "$(HOME)" }

[kubernetes]
namespace = "training"
image = "registry.example/meshwright:1"
volume = "shared-disk"
secret = "tokens"
queue = "team-a"
service_account = "trainer"
resources = { memory = "900Gi", "rdma/ib" = 8 }
node_selector = { pool = "h100" }
"""
TWO_NODES = ["layout.dp_shard=16", "batch.global_batch=32", "run.device=auto", "run.max_restarts=3"]


def read_schema(name: str) -> dict[str, Any]:
    return json.loads((SCHEMAS / name).read_text())


def errors_of(document: dict[str, Any]) -> list[str]:
    """What the schema of a document's kind says against it."""
    core = Resource.from_contents(read_schema(CORE), default_specification=DRAFT202012)
    registry = Registry().with_resource(CORE, core)
    kind = document["kind"]
    schema = (
        {"$ref": f"{CORE}#/$defs/io.k8s.api.core.v1.ConfigMap"} if kind == "ConfigMap" else read_schema(OF_KIND[kind])
    )
    return [error.message for error in Draft202012Validator(schema, registry=registry).iter_errors(document)]


@pytest.fixture
def site(tmp_path: Path) -> str:
    path = tmp_path / "site.toml"
    path.write_text(SITE)
    return str(path)


def made(site: str | None, kind: str = "jobset", overrides: list[str] = TWO_NODES, **options) -> list[dict[str, Any]]:
    """The manifests, as a parser reads their text."""
    request = request_of(load_job(SMALL, overrides), site, kind, **options)
    return list(yaml.safe_load_all(yaml_text(manifests(request), "a test")))


def templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a document, those with ranks last."""
    spec = document["spec"]
    if document["kind"] == "JobSet":
        return [spec["replicatedJobs"][0]["template"]["spec"]["template"]]
    if document["kind"] == "PyTorchJob":
        return [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()]
    cluster = spec["rayClusterSpec"]
    return [cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_manifests_match_the_published_schemas(site: str, kind: str, nodes: int) -> None:
    overrides = [f"layout.dp_shard={8 * nodes}", *TWO_NODES[1:]]
    documents = made(site, kind, overrides)
    assert documents[0]["kind"] == "ConfigMap" and len(documents) == 2
    assert [errors_of(document) for document in documents] == [[], []]


def tables(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from tables(part)


FREE = {"labels", "annotations", "data", "nodeSelector", "requests", "limits", "rayStartParams"}
"""Tables whose keys anybody may choose."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_misspelled_field_anywhere_is_found(site: str, kind: str) -> None:
    for document in made(site, kind):
        changed = copy.deepcopy(document)
        free = [id(table[name]) for table in tables(changed) for name in FREE & table.keys()]
        for table in tables(changed):
            for name in [] if id(table) in free else list(table):
                table[f"{name}s"] = table.pop(name)
                if table is not changed or name != "kind":
                    assert errors_of(changed), f"{name}s instead of {name}"
                table[name] = table.pop(f"{name}s")
        assert errors_of(changed) == []


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_ranks_start_without_a_shell_and_nothing_of_a_job_is_replaced(site: str, kind: str) -> None:
    _, document = made(site, kind, overrides=[*TWO_NODES, "run.folder=runs/$(HOME)/`id`/run"])
    words = templates(document)[-1]["spec"]["containers"][0]["command"]
    assert words[:5] == ["python", "-P", "-m", "meshwright", "train"]
    assert "run.folder=/mnt/meshwright/runs/$$(HOME)/`id`/run" in words


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_pods_with_ranks_have(site: str, kind: str) -> None:
    config, document = made(site, kind, grace_s=450)
    assert config["metadata"]["namespace"] == document["metadata"]["namespace"] == "training"
    assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    spec = templates(document)[-1]["spec"]
    container = spec["containers"][0]
    gpus = {"nvidia.com/gpu": 8, "rdma/ib": 8}
    assert container["resources"] == {"limits": gpus, "requests": {**gpus, "cpu": 96, "memory": "900Gi"}}
    assert spec["terminationGracePeriodSeconds"] == 450 and spec["nodeSelector"] == {"pool": "h100"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in spec["volumes"]
    assert {"name": "shared", "persistentVolumeClaim": {"claimName": "shared-disk"}} in spec["volumes"]
    assert {"name": "shared", "mountPath": "/mnt/meshwright"} in container["volumeMounts"]
    assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    assert {"name": "ODD", "value": "$$(HOME)"} in container["env"], "nothing in it is replaced"
    assert spec["serviceAccountName"] == "trainer" and spec["shareProcessNamespace"] is True


def test_the_job_in_the_config_map_is_the_job(site: str, tmp_path: Path) -> None:
    config, _ = made(site)
    (tmp_path / "job.toml").write_text(config["data"]["job.toml"])
    assert load_job(str(tmp_path / "job.toml")).job == load_job(SMALL, TWO_NODES).job


def test_one_node_starts_without_a_meeting_and_a_job_on_cpus_without_gpus() -> None:
    _, document = made(None, overrides=["run.folder=runs/1 b"], image="i", volume="v")
    container = templates(document)[0]["spec"]["containers"][0]
    assert "--master" not in container["command"] and "run.folder=/mnt/meshwright/runs/1 b" in container["command"]
    assert "resources" not in container and "tolerations" not in templates(document)[0]["spec"]
    assert document["metadata"]["name"] == "run-1-b"


def test_what_ends_a_run_and_what_restarts_it(site: str) -> None:
    spec = made(site)[1]["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 3
    assert [rule["action"] for rule in spec["failurePolicy"]["rules"]] == ["RestartJobSetAndIgnoreMaxRestarts"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0 and job["completions"] == job["parallelism"] == 2
    assert made(site, "pytorchjob")[1]["spec"]["runPolicy"]["backoffLimit"] == 6
    assert made(site, "rayjob")[1]["spec"]["backoffLimit"] == 3


@pytest.mark.parametrize("state", ["done", "failed"])
@pytest.mark.parametrize("continues", [False, True])
def test_a_ray_job_s_script(site: str, tmp_path: Path, continues: bool, state: str) -> None:
    """Its words and its exit code; `python` is a stand-in that writes down its words, no Ray is involved."""
    config, document = made(site, "rayjob")
    assert document["spec"]["entrypoint"] == "bash /etc/meshwright/ray.sh"
    text = config["data"]["ray.sh"]
    (run := tmp_path / "volume" / "run").mkdir(parents=True)
    if continues:
        (run / "job.resolved.json").touch()
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh\necho "$*" >>{tmp_path}/words\necho '  "state": "{state}",'\n""")
    python.chmod(0o755)
    script = text.replace("/mnt/meshwright/run", str(run))
    done = subprocess.run(["bash", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, stdout=subprocess.DEVNULL)
    assert (done.returncode == 0) == (state == "done")
    first, *rest = (tmp_path / "words").read_text().replace("-P -m meshwright ", "").splitlines()
    new = f"submit /etc/meshwright/job.toml --on ray --set run.folder={run}"
    assert first == (f"submit {run} --on ray" if continues else new)
    assert rest == [f"logs {run} --follow", f"status {run}", f"status {run} --json"]


@pytest.mark.parametrize(
    ("overrides", "options", "sentence"),
    [
        ([], {"image": None}, "the pods need --container, a container image that has meshwright; give it"),
        ([], {"volume": None}, "the pods need --volume, a volume for the run folder that all nodes share; give it"),
        ([], {"volume": "My_Disk"}, "--volume = 'My_Disk' is not a name in Kubernetes"),
        ([], {"namespace": "a/b"}, "--namespace = 'a/b' is not a name in Kubernetes"),
        ([], {"kind": "job"}, "--kind = job is not known; use one of jobset, pytorchjob, rayjob"),
        (["layout.dp_shard=2"], {}, "cluster.gpus_per_node is not set, so it is unknown how many of the layout's 2"),
        (["layout.dp_shard=3", "cluster.gpus_per_node=2"], {}, "layout needs 3 ranks, which do not fill whole nodes"),
        (
            ["layout.dp_shard=2", "cluster.gpus_per_node=2", "cluster.nodes=2"],
            {},
            "cluster.nodes = 2, but the layout's",
        ),
        (["run.folder=/scratch/x"], {}, "run.folder = /scratch/x is not on the shared volume, which pods mount at"),
        (["run.folder=../x"], {}, "is not on the shared volume"),
        ([f"run.folder={'x' * 60}"], {}, "of 60 characters, and the pods' host names leave room for 54; choose"),
    ],
)
def test_what_is_refused(overrides: list[str], options: dict[str, Any], sentence: str) -> None:
    given = {"image": "i", "volume": "v", "kind": None} | options
    with pytest.raises(UserError) as refused:
        request_of(load_job(SMALL, ["batch.global_batch=12", *overrides]), **given)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('environment = { HF_TOKEN = "hf_1" }', "environment.HF_TOKEN of site looks like a credential"),
        ('environment = { HUB = "https://me:pass@hub" }', "environment.HUB of site looks like a credential"),
        ("[kubernetes]\nimagee = 'x'", "kubernetes.imagee is not allowed or missing"),
        ("[kubernetes]\nmount = 'shared'", "kubernetes.mount is not allowed or missing"),
    ],
)
def test_profiles_that_are_refused(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "site.toml").write_text(f"gpus_per_node = 1\n{line}\n")
    with pytest.raises(UserError) as refused:
        request_of(load_job(SMALL), str(tmp_path / "site.toml"), image="i", volume="v")
    assert sentence in str(refused.value)


def test_the_job_s_machines_must_be_the_site_s(site: str) -> None:
    with pytest.raises(UserError, match=r"cluster\.gpu = a100-80gb, but site has h100"):
        made(site, overrides=[*TWO_NODES, "cluster.gpu=a100-80gb"])


def test_texts_that_parsers_take_for_something_else_are_quoted() -> None:
    odd = [
        "1e3",
        "on",
        "y",
        "0x1",
        "1_0",
        "2026-01-01",
        "~",
        "null",
        "a: b",
        "- a",
        "",
        "café",
        "ends ",
        "#x",
        "=",
        "1:30",
    ]
    text = yaml_text([{"words": odd, "lines": "a\n\tb \n\n"}], "t")
    assert yaml.safe_load(text) == {"words": odd, "lines": "a\n\tb \n\n"}
    for word in ("1e3", "y", "0x1", "1:30", "1_0"):
        assert f'"{word}"' in text
