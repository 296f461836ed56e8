#!/bin/sh
# A stand-in for kubectl: objects are JSON files in $FAKE_CLUSTER, and what a controller would do the test does.
# It knows apply, get, delete, logs and exec in the forms that meshwright uses, writes every call to `calls`, and fails
# with the text in fail-VERB if there is such a file. `logs` prints the file `log`, `exec` runs the command after --.
cd "$FAKE_CLUSTER" || exit
printf '%s\037' "$@" >>calls && echo >>calls
if [ "$1" = --namespace ]; then shift 2; fi
verb=$1
shift
if [ -e "fail-$verb" ]; then
  cat "fail-$verb" >&2
  exit 1
fi
file() { echo "${1%/*}.${1#*/}.json"; }
case $verb in
apply)
  exec "$FAKE_PYTHON" -c '
import json, pathlib, sys, yaml
resources = {"ConfigMap": "configmap", "JobSet": "jobsets.jobset.x-k8s.io", "PyTorchJob": "pytorchjobs.kubeflow.org"}
for document in yaml.safe_load_all(sys.stdin):
    resource = resources.get(document["kind"], "rayjobs.ray.io")
    pathlib.Path("{}.{}.json".format(resource, document["metadata"]["name"])).write_text(json.dumps(document))
'
  ;;
get)
  if [ "$1" = pods ]; then
    printf '{"items": [' && cat pod.*.json 2>/dev/null | paste -sd, && echo ']}'
  elif [ -e "$(file "$1")" ]; then
    cat "$(file "$1")"
  fi
  ;;
delete)
  for word; do
    case $word in */*) rm -f "$(file "$word")" ;; esac
  done
  ;;
logs) cat log ;;
exec)
  while [ "$1" != -- ]; do shift; done
  shift 2
  exec "$FAKE_PYTHON" "$@"
  ;;
*) exit 64 ;;
esac
