"""The runs page in a real Chromium: what it reads out under the pointer and after an error."""

import shutil
from typing import Any

import pytest
from studio_runs import make_run

from meshwright.studio import Studio

pytestmark = pytest.mark.browser


def hover(page: Any, share: float) -> str:
    """What the loss chart reads out at this share of its x axis."""
    page.wait_for_selector("[data-field=loss] path")
    box = page.locator("[data-field=loss] svg").bounding_box()
    left, right = 62, 12
    page.mouse.move(box["x"] + left + share * (box["width"] - left - right), box["y"] + box["height"] / 2)
    return str(page.inner_text("[data-field=loss] .readout"))


def test_runs_that_had_ended_are_not_read_out(tab: Any, studio: Studio) -> None:
    """Nor those that had not begun; a validation is read out as long as its run lasted."""
    make_run(studio.runs.root / "short", steps=20)
    make_run(studio.runs.root / "long", steps=100)
    page = tab("#runs?run=short&run=long")
    page.wait_for_selector("[data-field=loss] path:nth-of-type(2)")
    both = hover(page, 0.1)
    assert "short" in both and "long" in both
    late = hover(page, 0.5)
    assert "steps 5" in late and "long" in late and "short" not in late
    assert "long validation 2.5" in late
    assert "short" not in hover(page, 1.0) and "long 2.06" in hover(page, 1.0)
    shutil.rmtree(studio.runs.root / "short")
    shutil.rmtree(studio.runs.root / "long")


def test_a_run_that_cannot_be_shown_does_not_leave_the_one_before(tab: Any, studio: Studio) -> None:
    make_run(studio.runs.root / "removed", steps=5)
    page = tab("#runs?run=first&show=first")
    page.wait_for_selector("#run-title:has-text('first')")
    shutil.rmtree(studio.runs.root / "removed")
    page.evaluate("location.hash = '#runs?run=first&show=removed'")
    page.wait_for_selector("#runs-status.error:has-text('removed cannot be shown')")
    assert not page.is_visible("#run")
    page.click("#list button:has-text('first')")
    page.wait_for_selector("#run-title:has-text('first')")
    page.wait_for_selector("#runs-status:not(.error)")
