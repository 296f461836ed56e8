"""The plan page in a real Chromium: what it shows after an error."""

from typing import Any

import pytest
from studio_runs import planned

pytestmark = pytest.mark.browser
SMALL = "#plan?model=gpt2&gpu=a100-40gb&nodes=1&gpus=2&seq=1024&batch=65536"


def test_after_an_error_no_earlier_answer_stays(tab: Any) -> None:
    """Neither layouts nor pictures nor sizes of another model, and the right answer is back after a correction."""
    page = tab(SMALL)
    planned(page)
    assert page.is_visible("#layouts") and "124M" in page.inner_text("#size")
    page.fill("[name=seq]", "0")
    page.wait_for_selector("#plan-status.error:has-text('= 0 is not')")
    for old in ("#layouts", "#chosen", "#rejected"):
        assert not page.is_visible(old), old
    assert page.inner_text("#size") == "" and page.inner_text("#practice") == ""
    page.select_option("[name=model]", "llama-3.2-1b")
    page.wait_for_function("() => document.querySelector('[data-shape=width]').value === '2048'")
    page.fill("[name=seq]", "1024")
    planned(page)
    assert page.is_visible("#layouts") and "1.24B" in page.inner_text("#size") and page.is_visible("#chosen")


def test_a_layout_that_cannot_be_drawn_hides_the_one_before(tab: Any) -> None:
    page = tab(SMALL)
    planned(page)
    page.evaluate("location.hash = location.hash + '&pick=nonsense'")
    page.wait_for_selector("#plan-status.error:has-text('pick is not a layout')")
    assert not page.is_visible("#chosen") and page.is_visible("#layouts")


def test_a_studio_that_is_gone_leaves_no_answer(tab: Any) -> None:
    page = tab(SMALL)
    planned(page)
    page.route("**/api/plan", lambda route: route.fulfill(status=200, content_type="text/html", body="gone"))
    page.select_option("[name=model]", "gpt2-xl")
    page.wait_for_selector("#plan-status.error:has-text('does not respond')")
    assert not page.is_visible("#layouts") and not page.is_visible("#chosen")
