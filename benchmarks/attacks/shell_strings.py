"""Strings that try to inject commands, through the writer of batch scripts, whose scripts bash then runs."""

import json
import random
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from attacks.case import Case, Family, InternalError, command

PIECES = ["'", '"', "`", "$(", ")", "${", "}", ";", "&", "|", ">", "<", "#", "%j", "%", "!", "*", " ", "  ", "a", "x y"]
PIECES += ["é", "-", "--", "=", ",", "[", "]", "~", "$HOME", "#SBATCH --x", "$(pwn)", "`pwn`", ";pwn;", "'; pwn; '"]
PIECES += ['"; pwn; "', "&& pwn", "|pwn", ">owned", "\\"]
CONTROLS = ["\n", "\r", "\t", "\0", "\u2028", "\x85", "\x1b[0m", "\npwn\n", "\n#SBATCH --wrap=pwn\n"]
PLACES = ["folder", "account", "partition", "qos", "sbatch", "container", "time", "prompt", "job name", "module"]
PLACES += ["environment", "variable", "python", "title", "directive", "sources"]
SYSTEM = "/usr/bin:/bin"
_STUBS = {
    "pwn": 'echo owned >"$STUBS/pwned"\n',
    # The step itself: options off, then the command, which for an agent is a separate shell.
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n',
    "mw": 'printf "%s\\0" "$@" >"$STUBS/ran"\n',
    "image": 'printf "%s\\0" "$@" >"$STUBS/ran"\n',
    "scontrol": "echo node1\n",
    "module": "exit 0\n",
    "sleep": "exit 0\n",
}


def executed(script: str, folder: Path) -> list[str]:
    """Run a batch script with stubs for all it starts; returns its ranks' arguments. Anything else is an error."""
    stubs = folder / "stubs"
    stubs.mkdir()
    for name, body in _STUBS.items():
        (stubs / name).write_text(f"#!/bin/bash\n{body}")
        (stubs / name).chmod(0o755)
    lines = script.split("\n")
    head = lines[1 : lines.index("")]
    if odd := [line for line in head if not line.startswith("# ") and not line.startswith("#SBATCH ")]:
        raise InternalError(f"a line before the first command is none of Slurm's: {odd[0]!r}")
    text = folder / "script.sh"
    text.write_text(script, encoding="utf-8")
    if (parsed := subprocess.run(["bash", "-n", text], capture_output=True)).returncode:
        raise InternalError(f"bash cannot read it: {parsed.stderr.decode(errors='replace')}")
    before = {path.name for path in folder.iterdir()}
    variables = {"PATH": f"{stubs}:{SYSTEM}", "STUBS": str(stubs), "HOME": str(folder), "LANG": "C.UTF-8"}
    variables |= {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "node1"}
    subprocess.run(["bash", text], env=variables, cwd=folder, capture_output=True, timeout=15)
    if (stubs / "pwned").exists():
        raise InternalError("a foreign command ran")
    if new := {path.name for path in folder.iterdir()} - before - {"run"}:
        raise InternalError(f"the script created {new}")
    if not (stubs / "ran").exists():
        raise InternalError("the step did not run")
    return (stubs / "ran").read_bytes().decode().split("\0")[:-1]


def draw(chance: random.Random) -> Iterator[Case]:
    """One or two places of a submission at a time hold a hostile string."""
    number = 0
    while True:
        number += 1
        given = {place: _string(chance) for place in chance.sample(PLACES, chance.randint(1, 2))}
        ranks, per_rank = chance.choice([1, 2]), chance.random() < 0.3
        yield Case(f"{number} {' and '.join(given)}", partial(_run, given, ranks, per_rank))


def _string(chance: random.Random) -> str:
    pieces = PIECES + CONTROLS if chance.random() < 0.3 else PIECES
    return "".join(chance.choice(pieces) for _ in range(chance.randint(1, 6)))


def _run(given: dict[str, str], ranks: int, per_rank: bool, folder: Path) -> None:
    run = folder / "run" / given.get("folder", "plain").replace("/", "-")
    profile = {
        "title": given.get("title", "here"),
        "gpus_per_node": 2,
        "modules": [given["module"]] if "module" in given else [],
        "environment": {given.get("variable", "A"): given.get("environment", "1")},
        "directives": [given["directive"]] if "directive" in given else [],
        "container_command": "image",
        "python": given.get("python", "mw"),
    }
    (folder / "site.toml").write_text(_toml(profile), encoding="utf-8", errors="surrogatepass")
    job = folder / f"{given.get('job name', 'job')[:80].replace('/', '-')}.toml"
    sets = {"run.folder": str(run), "evaluation.sample_prompt": given.get("prompt", "x")}
    sets |= {"data.sources": [given.get("sources", "builtin:stdlib")]}
    words = ["--site", "site.toml", "--time", given.get("time", "10"), "--dry-run", "--json"]
    for option in ("account", "partition", "qos", "container", "sbatch"):
        words += [f"--{option}", given[option]] if option in given else []
    words += ["--per-rank"] if per_rank else []
    for field, value in {**sets, "layout.dp_replicate": ranks, "batch.global_batch": 8 * ranks}.items():
        words += ["--set", f"{field}={json.dumps(value)}"]
    try:
        job.write_text('[model]\npreset = "tiny-llama"\n[batch]\nsequence_length = 64\n')
    except (OSError, ValueError):
        return  # not a possible file name
    scripts = json.loads(command("submit", job.name, *words))["scripts"]
    if "python" in given and "container" not in given:
        return  # whatever it is, the user's own profile starts it; bash reads it as one word
    ran = executed(scripts["slurm/run.sh"], folder)
    if str(run) not in ran:
        raise InternalError(f"the program got {ran} instead of {run}")


def _toml(table: dict[str, object]) -> str:
    """A profile as a file; JSON's texts are TOML's, a table is inline."""
    lines = []
    for name, value in table.items():
        if isinstance(value, dict):
            value = "{" + ", ".join(f"{json.dumps(key)} = {json.dumps(inner)}" for key, inner in value.items()) + "}"
            lines.append(f"{name} = {value}")
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines)


SHELL_STRINGS = Family("shell strings", draw)
