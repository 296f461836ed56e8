"""Rooms import downward only, through their faces and without circles, and the light ones import no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "meshwright"
# From the ground up; a room may import itself and what stands before it.
ORDER = [
    "version",
    "errors",
    "amounts",
    "atomic",
    "ranks",
    "calls",
    "python_process",
    "registries",
    "reading",
    "torch_private",
    "job",
    "hardware",
    "pipeline",
    "cost",
    "layout",
    "model",
    "data",
]
ORDER += [
    "checkpoint",
    "parallel",
    "plan",
    "train",
    "runs",
    "launch",
    "measure",
    "verify",
    "rehearse",
    "studio",
    "api",
    "cli",
]


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        rooms |= {name.split(".")[1] for name in names if name.startswith("meshwright.")}
    return rooms


def test_imports_point_down() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        allowed = set(ORDER[: ORDER.index(room) + 1])
        wrong += [f"{path.relative_to(PACKAGE)} imports {name}" for name in imported_rooms(path) - allowed]
    assert wrong == []


def modules() -> dict[str, Path]:
    """Every module of the package by its name: "job.load", and "job" for the room's face."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(node: ast.AST, typing: bool = True) -> Iterator[tuple[str, str]]:
    """Module and name of all that is imported from the package, with or without what only type checkers import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not typing:
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("meshwright."):
            yield from ((str(child.module).removeprefix("meshwright."), alias.name) for alias in child.names)
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names if alias.name.startswith("meshwright.")]
            yield from ((name.removeprefix("meshwright."), "") for name in names)
        yield from imports(child, typing)


# Modules inside a room's folder that other rooms may import; this can only shrink.
# The folder's face is for commands that need no torch, and this one imports it.
DEEP = {"launch.slurm.submit"}


def test_other_rooms_are_entered_by_their_face() -> None:
    """Its face is what its __init__ names and, for the rest, its modules; never a module inside one of its folders."""
    known = modules()
    faces = {
        room: {name for _, name in imports(ast.parse(known[room].read_text(encoding="utf-8")))}
        for room in {name.partition(".")[0] for name in known}
    }
    wrong, used = [], set()
    for here, path in known.items():
        for module, name in imports(ast.parse(path.read_text(encoding="utf-8"))):
            room, _, rest = module.partition(".")
            line = f"{here}: from meshwright.{module} import {name}"
            if name.startswith("_"):
                wrong.append(f"{line}: an underscore stays in its module")
            if room == here.partition(".")[0]:
                continue
            if rest and name in faces[room]:
                wrong.append(f"{line}: meshwright.{room} names it")
            if "." in rest and module not in DEEP:
                wrong.append(f"{line}: import it from meshwright.{room}.{rest.partition('.')[0]}")
            used.add(module)
    assert wrong == []
    assert used >= DEEP  # what nobody imports any more is taken off


def test_no_circles_inside_rooms() -> None:
    """Imports inside functions count: they only hide a circle."""
    known = modules()
    graph = {}
    for here, path in known.items():
        found = imports(ast.parse(path.read_text(encoding="utf-8")), typing=False)
        graph[here] = {whole if (whole := f"{module}.{name}") in known else module for module, name in found} - {here}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {' -> '.join(reversed(error.args[1]))}") from None


def test_files_stay_small_enough_to_read() -> None:
    long = {
        str(path.relative_to(PACKAGE)): n for path in PACKAGE.rglob("*.py") if (n := len(path.open().readlines())) > 420
    }
    assert long == {}


def test_light_rooms_import_no_torch() -> None:
    rooms = ("cli", "api", "registries", "job", "hardware", "pipeline", "cost", "layout", "plan", "studio.worker")
    light = ", ".join(f"meshwright.{room}" for room in rooms)
    code = f"import sys, {light}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Attributes of torch's objects that it keeps to itself, beside those found by their path.
PRIVATE = {"_local_tensor", "_spec", "_get_fsdp_state", "_fsdp_param_group", "_fsdp_param_groups", "_all_gather_result"}
PRIVATE |= {"_sharded_param_data", "_set_unshard_async_op", "_base", "_is_view", "_cdata", "_compiled_call_impl"}
PRIVATE |= {"_call_impl", "_dispatch_cache", "_register_backend", "_set_default_backend"}


def private_names(path: Path) -> set[str]:
    """The underscores of torch that a file names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("torch") and "._" in alias.name}
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name for name in whole if "._" in name}
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            own = isinstance(root, ast.Name) and root.id == "self"
            if (isinstance(root, ast.Name) and root.id in ("torch", "dist", "c10d")) or (
                node.attr in PRIVATE and not own
            ):
                found.add(node.attr)
    return found


def test_what_torch_keeps_to_itself_is_named_behind_one_door() -> None:
    outside = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "torch_private"]
    assert {str(path.relative_to(PACKAGE)): names for path in outside if (names := private_names(path))} == {}
    inside = {name for path in (PACKAGE / "torch_private").glob("*.py") for name in private_names(path)}
    assert len(inside) > 20  # or nothing is found any more
