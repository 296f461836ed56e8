"""Process-wide settings of a run's device."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.running import Run
from meshwright.train import prepare_device
from meshwright.verify import run_ranks


def _in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def _compute_threads() -> tuple[int, int]:
    """Of a thread that was prepared, and of one that was not, once a third asked for one."""
    torch.set_num_threads(2)

    def prepared() -> int:
        prepare_device(Job(), torch.device("cpu"))
        _in_a_thread(lambda: torch.set_num_threads(1))  # as torch's page-locking thread does for itself
        return torch.get_num_threads()

    return _in_a_thread(prepared), _in_a_thread(torch.get_num_threads)


def test_the_loaders_thread_takes_no_core_from_updates_on_the_host() -> None:
    [(prepared, unprepared)] = run_ranks(_compute_threads, 1)
    assert unprepared == 1, "torch has changed: what prepare_device does about it may go"
    assert prepared == 2


def test_compiled_code_is_kept_apart_for_every_kind_of_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder() -> Path:
        prepare_device(Job(run=Run(compile=True)), torch.device("cpu"))
        return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    here = folder()
    assert here.parent == tmp_path / "meshwright" / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as torch 2.13 does when it is imported
    assert folder() == here
    assert folder() == here, "a process started by this one looks where this one does"

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert folder() == tmp_path / "mine" / here.name
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert folder().parent == tmp_path / "mine" and folder().name != here.name


def test_a_place_that_cannot_hold_compiled_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"file/\w+ cannot be made for compiled code \(Not a directory\); let TORCHIND"):
        prepare_device(Job(run=Run(compile=True)), torch.device("cpu"))
