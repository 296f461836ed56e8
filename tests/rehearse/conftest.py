"""No profile of the machine that runs the tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def profiles(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for this user's profiles."""
    folder = tmp_path_factory.mktemp("profiles")
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(folder))
    return folder
