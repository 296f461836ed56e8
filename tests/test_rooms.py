"""Rooms import downward only, and the light ones import no torch."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "meshwright"
# From the ground up; a room may import itself and what stands before it.
ORDER = ["version", "errors", "reading", "job", "hardware", "pipeline", "cost", "layout", "model", "data"]
ORDER += ["checkpoint", "parallel", "plan", "train", "runs", "launch", "measure", "studio", "verify", "cli"]


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


def test_files_stay_small_enough_to_read() -> None:
    long = {
        str(path.relative_to(PACKAGE)): n for path in PACKAGE.rglob("*.py") if (n := len(path.open().readlines())) > 420
    }
    assert long == {}


def test_light_rooms_import_no_torch() -> None:
    rooms = ("cli", "job", "hardware", "pipeline", "cost", "layout", "plan", "studio.worker")
    light = ", ".join(f"meshwright.{room}" for room in rooms)
    code = f"import sys, {light}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
