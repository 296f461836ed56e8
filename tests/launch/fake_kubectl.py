"""A stand-in for kubectl: objects are JSON files in $FAKE_CLUSTER, and what a controller would do the test does.

It knows apply, get, delete, logs and exec in the forms that meshwright uses, writes every call to `calls`, and fails
with the text in `fail-VERB` if there is such a file. `logs` prints the file `log`, `exec` runs the command after --.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

CLUSTER = Path(os.environ["FAKE_CLUSTER"])
PLURALS = {"ConfigMap": "configmap", "JobSet": "jobsets.jobset.x-k8s.io", "PyTorchJob": "pytorchjobs.kubeflow.org"}
PLURALS["RayJob"] = "rayjobs.ray.io"


def file_of(resource: str, name: str) -> Path:
    return CLUSTER / f"{resource}.{name}.json"


def main(words: list[str]) -> int:
    with (CLUSTER / "calls").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    if words[0] == "--namespace":
        words = words[2:]
    verb, *rest = words
    if (failure := CLUSTER / f"fail-{verb}").exists():
        sys.stderr.write(failure.read_text())
        return 1
    if verb == "apply":
        import yaml  # every other call is quicker without it

        for document in yaml.safe_load_all(sys.stdin):
            file_of(PLURALS[document["kind"]], document["metadata"]["name"]).write_text(json.dumps(document))
    elif verb == "get" and rest[0] == "pods":
        print(json.dumps({"items": [json.loads(path.read_text()) for path in sorted(CLUSTER.glob("pod.*.json"))]}))
    elif verb == "get":
        path = file_of(*rest[0].split("/"))
        print(path.read_text() if path.exists() else "", end="")
    elif verb == "delete":
        for word in rest:
            if "/" in word:
                file_of(*word.split("/")).unlink(missing_ok=True)
    elif verb == "logs":
        print((CLUSTER / "log").read_text(), end="")
    elif verb == "exec":
        command = rest[rest.index("--") + 1 :]
        return subprocess.run([sys.executable, *command[1:]]).returncode
    else:
        return 64
    return 0


sys.exit(main(sys.argv[1:]))
