"""What the studio's tests share: a server in this process, a browser, a folder of runs."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from studio_runs import SHOTS, make_run

from meshwright.studio import Studio

LONG = 120_000
"""Milliseconds for answers on a machine that is busy with other tests; how long they take is measured elsewhere."""


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs."""
    root = tmp_path_factory.mktemp("studio") / "runs"
    root.mkdir()
    make_run(root / "first")
    make_run(root / "second", ended=None)
    return root


@pytest.fixture(scope="session")
def studio(runs: Path) -> Iterator[Studio]:
    """A server of these runs, its planner loading."""
    server = Studio(runs)
    server.planner.start()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    missing = None if path else "no chromium is installed (scripts/chromium-packages installs Debian's)"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing = "playwright is not installed (make setup installs it)"
    if missing:
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    SHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play:
        # Chromium's own sandbox cannot be used by root, as which containers run.
        chromium = play.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser: Any, studio: Studio) -> Iterator[Callable[..., Any]]:
    """`tab("#runs", width=390, color_scheme="dark")` is a page there; an error fails the test if it is not expected."""
    contexts, problems = [], []

    def open_(
        place: str = "",
        width: int = 1200,
        height: int = 900,
        color_scheme: str = "light",
        server: Studio = studio,
        expected: str = "nothing",
    ) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=color_scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(LONG)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda message: (
                problems.append(message.text) if message.type == "error" and expected not in message.text else None
            ),
        )
        page.goto(server.address + place)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert problems == []
