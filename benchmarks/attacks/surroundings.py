"""What lies around a command: modules in the working directory, a stranger's git settings, and readers that leave."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from attacks.case import Case, Family, InternalError
from attacks.tiny_run import JOB, SET, left_alone, require_equal

MODULES = ["pydantic", "torch", "json", "numpy", "jinja2", "typer", "rich", "meshwright", "gc", "multiprocessing", "re"]
MARKED = "import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch(); raise ImportError('not the real one')\n"
SETTINGS = ["core.fsmonitor", "diff.external", "diff.planted.textconv", "diff.planted.command", "filter.planted.clean"]
SETTINGS += ["filter.planted.process", "core.hooksPath", "core.pager", "core.sshCommand", "core.editor", "gpg.program"]
HOOKS = ["post-index-change", "fsmonitor-watchman", "reference-transaction", "post-checkout", "pre-auto-gc"]


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of surroundings."""
    left_alone()  # once, and for all processes that are forked from here
    for number in range(1 << 62):
        kind = chance.choices([_git_settings, _closed_pipe, _modules], [5, 3, 2])[0]
        yield Case(f"{number} {kind.__name__[1:]}", partial(kind, f"{number} {chance.random()}"), seconds=120.0)


def _git_settings(seed: str, folder: Path) -> None:
    """The code of a checkout is recorded while its settings, attributes and hooks name programs."""
    from meshwright.runs.provenance import describe_code

    chance = random.Random(seed)
    (checkout := folder / "checkout").mkdir()
    os.chdir(checkout)
    (program := folder / "post-index-change").write_text(f"#!/bin/sh\ntouch {folder / 'ran'}\nexec cat\n")
    program.chmod(0o755)
    (checkout / "train.py").write_text("a = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        _git(*words)
    changed = chance.random() < 0.7
    (checkout / "train.py").write_text("a = 2\n" if changed else "a = 1\n")
    included = folder / "included"
    for setting in chance.sample(SETTINGS, 3):
        where = ["--file", str(included)] if chance.random() < 0.2 else []
        _git("config", *where, setting, str(folder) if setting == "core.hooksPath" else str(program))
    _git("config", "include.path", str(included))
    attributes = chance.choice(["*.py diff=planted", "*.py filter=planted", "* diff=planted filter=planted", ""])
    (checkout / ".gitattributes").write_text(attributes)
    (checkout / ".git" / "info" / "attributes").write_text(attributes)
    (checkout / ".git" / "hooks").mkdir(exist_ok=True)
    for name in chance.sample(HOOKS, 2):
        (checkout / ".git" / "hooks" / name).write_text(program.read_text())
        (checkout / ".git" / "hooks" / name).chmod(0o755)
    (folder / "ran").unlink(missing_ok=True)

    code, diff = describe_code()
    assert not (folder / "ran").exists(), "a program that a checkout names ran"
    assert code["working_directory"]["commit"], "the checkout's commit was not recorded"
    assert ("+a = 2" in diff) == changed, f"the diff is wrong: {diff[:200]}"


def _git(*words: str) -> None:
    subprocess.run(["git", "-c", "user.name=A", "-c", "user.email=a@b.c", *words], check=True)


def _closed_pipe(seed: str, folder: Path) -> None:
    """`train … | head -c N`: the run must end as if somebody had read it all."""
    from meshwright.cli import main

    chance = random.Random(seed)
    reader, writer = os.pipe()
    if (process := os.fork()) == 0:
        os.close(writer)
        wanted = chance.choice([0, 0, 1, 80, 400, 1000])
        while wanted > 0 and (part := os.read(reader, wanted)):
            wanted -= len(part)
        os._exit(0)
    os.close(reader)
    streams = [1, 2] if chance.random() < 0.3 else [1]
    for stream in streams:
        os.dup2(writer, stream)
    os.close(writer)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.argv = ["meshwright", "train", JOB, *(word for one in SET for word in ("--set", one))]
    code: object = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    for stream in streams:  # a reader that wants more than there is waits for the end of the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.waitpid(process, 0)
    if code:
        raise InternalError(f"the command ended with {code}")
    require_equal(Path("run"))


def _modules(seed: str, folder: Path) -> None:
    """Processes start in a folder with modules named as those that every start imports."""
    from meshwright.data.chat import ChatTemplate
    from meshwright.data.conversations import Message
    from meshwright.studio.planner_process import PlannerProcess

    chance = random.Random(seed)
    for name in chance.sample(MODULES, 6):
        (folder / f"{name}.py").write_text(MARKED)
    os.environ.pop("PYTHONPATH", None)  # the tool's own, by which it finds the product, is no stranger's
    kind = chance.choice(["renderer", "planner", "ranks"])
    if kind == "renderer":
        assert ChatTemplate("{{ messages[0].content }}", {}, (), "a").prompt([Message("user", "hello")]) == "hello"
    elif kind == "planner":
        planner = PlannerProcess()
        try:
            planner.ask({})
        finally:
            planner.close()
    else:
        words = ["--nproc", "2", "--set", "layout.dp_replicate=2", "--set", "run.steps=1"]
        train = [sys.executable, "-P", "-m", "meshwright", "train", JOB, *words]
        package = {"PYTHONPATH": str(Path(__file__).parents[2])}
        assert subprocess.run(train, env={**os.environ, **package}).returncode == 0, "the ranks failed"
    ran = [path.name for path in folder.glob("*.ran")]
    assert not ran, f"{kind} ran {ran} of the working directory"


SURROUNDINGS = Family("surroundings", draw, weight=0.15)
