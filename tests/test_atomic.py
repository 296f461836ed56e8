"""Files and folders that appear whole or not at all, and the one place that writes and renames."""

import ast
import errno
from pathlib import Path

import pytest

from meshwright import atomic
from meshwright.errors import UserError

PACKAGE = Path(atomic.__file__).parent
MOVES_FOLDERS = {"atomic.py", "checkpoint/catalogue.py", "checkpoint/lease.py", "data/cache.py"}
"""Folders that others race for have rules of their own."""
MOVES_FINISHED_FILES = {"data/prepared/shard.py"}


def test_a_file_is_the_old_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    atomic.write_atomic(path, "old")
    with pytest.raises(KeyboardInterrupt), atomic.atomic_file(path) as draft:
        draft.write_text("ne")
        raise KeyboardInterrupt
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"] and path.read_text() == "old"
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        atomic.write_atomic(path, "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"] and path.read_text() == "old"


def test_a_durable_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(atomic, "sync", lambda path: done.append("sync " + ("folder" if path.is_dir() else "file")))
    monkeypatch.setattr(Path, "replace", lambda self, target: (done.append("rename"), replace(self, target))[1])
    atomic.write_atomic(tmp_path / "x", b"\xff", durable=True)
    assert done == ["sync file", "rename", "sync folder"] and (tmp_path / "x").read_bytes() == b"\xff"


def test_a_folder_that_fails_leaves_nothing_not_even_its_parents(tmp_path: Path) -> None:
    for error, raised in ((ValueError("no"), ValueError), (OSError(errno.ENOSPC, "full"), UserError)):
        with pytest.raises(raised), atomic.new_folder(tmp_path / "a/b/c", 10) as draft:
            (draft / "file").write_text("half")
            raise error
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="MB free; free space"), atomic.new_folder(tmp_path / "a", 1 << 60):
        pass
    with atomic.new_folder(tmp_path / "a/b", 10) as draft:
        (draft / "file").write_text("whole")
        assert not (tmp_path / "a/b").exists()
    assert (tmp_path / "a/b/file").read_text() == "whole"
    with pytest.raises(UserError, match="is not an empty folder"), atomic.new_folder(tmp_path / "a", 10):
        pass


def test_nothing_else_writes_and_renames() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                renames = node.func.attr == "rename" or (node.func.attr == "replace" and len(node.args) == 1)
                found |= {str(path.relative_to(PACKAGE))} if renames else set()
    assert found == MOVES_FOLDERS | MOVES_FINISHED_FILES
