"""The guide and a plan's report in a real Chromium: where a reader starts, in which order, and on a phone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from studio_runs import SHOTS

from meshwright.studio.learn import guide_groups, guide_titles

pytestmark = [pytest.mark.browser, pytest.mark.thorough]
LINKS = "() => [...document.querySelectorAll('#guide a')].filter(e => e.checkVisibility()).length"


def test_the_guide_has_a_start_and_an_order(tab: Any) -> None:
    page = tab("#learn")
    page.wait_for_selector("#page h2:has-text('Start here')")
    pages = [each["name"] for group in guide_groups() for each in group["pages"]]
    assert sorted(["README", *pages]) == sorted(guide_titles())  # each once
    groups = page.locator("#guide summary").all_inner_texts()
    assert groups == [group["title"] for group in guide_groups()]
    assert groups[0] == "First steps" and "The playbook" in groups and "More" not in groups
    links = page.eval_on_selector_all("#guide a", "all => all.map(e => e.textContent)")
    assert links == [guide_titles()[name] for name in ["README", *pages]]
    assert page.evaluate(LINKS) == 1  # of the closed groups none
    page.click(".turn a")
    page.wait_for_selector("#page h2:has-text('The job file')")
    assert page.evaluate("scrollY") == 0
    page.click(".turn a:has-text('Start here')")
    page.wait_for_selector("#page h2:has-text('Start here')")
    page.click("#guide summary:has-text('The playbook')")
    page.click("#guide a:has-text('Tensor parallelism')")
    page.wait_for_selector("#page h2:has-text('Tensor parallelism')")
    assert page.locator("#guide a[aria-current]").inner_text() == "Tensor parallelism"


def test_no_wall_of_links_on_a_phone(tab: Any) -> None:
    page = tab("#learn?page=playbook/zero", width=390, height=844)
    page.wait_for_selector("#page h2:has-text('ZeRO')")
    assert page.evaluate(LINKS) == 0
    assert page.locator("#page h2").first.bounding_box()["y"] < 200  # the page itself, not what leads to it
    page.click("#pages > summary")
    assert 1 < page.evaluate(LINKS) < 40
    page.screenshot(path=SHOTS / "learn-pages-390.png")
    page.click("#guide a:has-text('Start here')")
    page.wait_for_selector("#page h2:has-text('Start here')")
    assert page.evaluate(LINKS) == 0  # closed again


def test_a_page_that_cannot_be_fetched_does_not_leave_the_one_before(tab: Any) -> None:
    page = tab("#learn")
    page.wait_for_selector("#page h2:has-text('Start here')")
    page.route("**/api/page*", lambda route: route.fulfill(status=200, content_type="text/html", body="gone"))
    page.click(".turn a")
    page.wait_for_selector("#page .error:has-text('does not respond')")
    assert "Start here" not in page.inner_text("#page")


@pytest.mark.parametrize("width", [390, 1200])
def test_a_plan_report_fits(browser: Any, tmp_path: Path, cli: Callable[..., Any], width: int) -> None:
    """Nothing is wider than a phone, except pictures that scroll by themselves."""
    job = tmp_path / "a-plan-with-quite-a-long-name-for-a-phone.toml"
    job.write_text(
        '[model]\npreset = "llama-2-7b"\n[batch]\nsequence_length = 1024\nglobal_batch = 64\nmicro_batch = 1\n'
        '[layout]\npp = 4\ndp_shard = 4\nzero = 1\nschedule = "1f1b"\n[run]\ncompile = true\n'
    )
    assert cli("report", str(job), "--cluster", "2x8xrtx-4090", "--out", str(tmp_path / "plan.html")).code == 0
    context = browser.new_context(viewport={"width": width, "height": 844})
    page = context.new_page()
    page.goto((tmp_path / "plan.html").as_uri())
    page.screenshot(path=SHOTS / f"plan-report-{width}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = (
        "width => [...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll') && !e.closest('svg')"
        " && e.getBoundingClientRect().right > width + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert page.evaluate(outside, width) == []
    shown = page.eval_on_selector_all(
        ".bars, .scaling", "all => all.map(e => [...e.children].filter(one => one.checkVisibility()).length)"
    )
    assert shown == [1, 1, 1]  # each drawn for this width, once
    small = page.eval_on_selector_all(
        ".picture svg text:not(.on), .chart svg text",
        "all => all.filter(e => e.checkVisibility()).map(e => e.getBoundingClientRect().height)",
    )
    assert min(small) >= 9  # still readable
    rows = page.eval_on_selector_all(
        ".bars rect", "all => all.filter(e => e.checkVisibility()).map(e => e.getBoundingClientRect().height)"
    )
    assert min(rows) >= 14
    context.close()
