"""The runs page in a real Chromium: the read-out, colours, smoothing and log axes, details, settings and notes."""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from studio_runs import make_run, metric

from meshwright.runs import RunFolder
from meshwright.studio import Studio

pytestmark = [pytest.mark.browser, pytest.mark.thorough]

COLOURS = """kind => {  // both at once: the next poll draws the chart anew
  const style = selector => getComputedStyle(document.querySelector(selector));
  return [style(`[data-field=loss] .mark.${kind}`).stroke, style(`.key.${kind}`).borderLeftColor];
}"""


def hover(page: Any, share: float) -> str:
    """What the loss chart reads out at this share of its x axis; once more if the page moved it on the way."""
    page.wait_for_selector("[data-field=loss] path")
    left, right = 62, 12
    for _ in range(20):
        box = page.locator("[data-field=loss] svg").bounding_box()
        if box is not None:  # not just being drawn anew
            x = box["x"] + left + share * (box["width"] - left - right)
            page.mouse.move(x, box["y"] + box["height"] / 2)
            text = str(page.inner_text("[data-field=loss] .readout"))
            if text.strip() and page.locator("[data-field=loss] svg").bounding_box() == box:
                return text
        page.wait_for_timeout(50)
    raise AssertionError("the loss chart reads nothing out under the pointer")


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


def test_a_chart_to_which_nothing_was_added_is_not_drawn_anew(tab: Any) -> None:
    page = tab("#runs?run=first")
    page.wait_for_selector("[data-field=loss] path")
    page.evaluate("document.querySelector('[data-field=loss] svg').id = 'as-it-was'")
    for _ in range(2):  # what the first brought has been drawn when the second comes
        with page.expect_response(lambda response: response.url.endswith("/api/runs")):
            pass
    assert page.locator("#as-it-was").count() == 1


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


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Studio]:
    """A studio whose runs belong to one test; its planner is never asked."""
    server = Studio(tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.close()


SWATCHES = (
    "() => Object.fromEntries([...document.querySelectorAll('#list tbody tr')].map(row =>"
    " [row.querySelector('.open').textContent, getComputedStyle(row.querySelector('.swatch')).color]))"
)


def colours(page: Any, count: int) -> dict[str, str]:
    page.wait_for_function(f"() => document.querySelectorAll('#list tbody tr').length === {count}")
    return dict(page.evaluate(SWATCHES))


def test_details_are_brought_into_sight(tab: Any) -> None:
    page = tab("#runs?run=first&run=second")
    page.wait_for_selector("[data-field=loss] path")
    assert page.evaluate("scrollY") == 0
    page.click("#list button:has-text('first')")
    page.wait_for_selector("#run-title:has-text('first')")
    page.wait_for_function("() => document.activeElement.id === 'run-title'")
    top = page.evaluate("document.getElementById('run-title').getBoundingClientRect().top")
    assert -5 <= top <= 450
    page.click("#run-close")
    page.wait_for_selector("#run", state="hidden")
    assert "show=" not in page.url


def test_colours_stay_with_their_run_and_do_not_repeat(tab: Any, own: Studio) -> None:
    root = own.runs.root
    make_run(root / "run-00", steps=2)
    for number in range(1, 30):
        shutil.copytree(root / "run-00", root / f"run-{number:02}")
    for number in range(30):
        os.utime(root / f"run-{number:02}" / "job.resolved.json", (1e9 + number, 1e9 + number))
    page = tab("#runs", server=own)
    before = colours(page, 30)
    assert len(set(before.values())) == 30
    make_run(root / "newer", steps=2)
    shutil.rmtree(root / "run-03")
    page.wait_for_selector("#list tbody tr:has-text('newer')")
    page.wait_for_selector("#list tbody tr:has-text('run-03')", state="detached")
    after = colours(page, 30)
    assert all(after[name] == colour for name, colour in before.items() if name != "run-03")
    page.reload()
    assert colours(page, 30) == after and len(set(after.values())) == 30
    page.wait_for_selector("[data-field=loss] path.curve")
    drawn = page.eval_on_selector_all(
        "[data-field=loss] path.curve", "all => all.map(each => getComputedStyle(each).stroke)"
    )
    assert drawn == list(after.values())[:5]  # the newest


def test_smoothing_and_log_axes(tab: Any, own: Studio) -> None:
    """A saw becomes its mean, a power law a straight line; the address keeps both choices."""
    run = make_run(own.runs.root / "saw", steps=0, ended=None)
    for step in range(1, 201):
        run.metric(metric(step, loss=8.0 / step, tokens_per_s=1000.0 + 500 * (-1) ** step))
    page = tab("#runs?run=saw", server=own)
    page.wait_for_selector("[data-field=tokens_per_s] path.curve")
    assert page.locator("path.smooth").count() == 0
    page.select_option("#smooth", "10")
    page.wait_for_selector("[data-field=tokens_per_s] path.smooth")
    rough, smooth = (
        [y for _, y in points(page, f"[data-field=tokens_per_s] path.{kind}")[20:-20]] for kind in ("pale", "smooth")
    )
    assert max(rough) - min(rough) > 100 and max(smooth) - min(smooth) < 10
    assert "smoothed" in page.inner_text("[data-field=loss] .legend")
    assert page.locator("[data-field=lr] path.smooth").count() == 0  # nothing to smooth
    page.check("#log-x")
    page.check("#log-y")
    page.wait_for_function("() => location.hash.includes('log=xy') && location.hash.includes('smooth=10')")
    line = points(page, "[data-field=loss] path.pale")
    (x0, y0), (x1, y1) = line[0], line[-1]
    assert max(abs(y - (y0 + (x - x0) / (x1 - x0) * (y1 - y0))) for x, y in line) < 0.5
    assert "log scale" in page.text_content("[data-field=loss] svg")
    page.reload()
    page.wait_for_selector("[data-field=loss] path.smooth")
    assert page.is_checked("#log-x") and page.is_checked("#log-y") and page.input_value("#smooth") == "10"


def points(page: Any, path: str) -> list[tuple[float, float]]:
    """The corners of a drawn curve."""
    drawn = page.get_attribute(path, "d")
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", drawn)]


def test_every_dashed_line_is_in_the_legend(tab: Any, own: Studio) -> None:
    run = make_run(own.runs.root / "checked", steps=9)
    for step in (3, 6):
        run.metric({"step": step, "val_loss": 3.0, "attempt": 0})
    run.event("restart", step=4, cause="x")
    run.event("bad_step", step=5)
    page = tab("#runs?run=checked", server=own)
    page.wait_for_selector("[data-field=loss] path.dash")
    keys = page.eval_on_selector_all(
        "[data-field=loss] .legend > span", "all => all.map(e => [e.textContent, e.firstChild.className])"
    )
    assert keys == [
        ["validation", "key dashed"],
        ["checkpoint, stop", "key upright saved"],
        ["restart", "key upright begun"],
        ["bad step", "key upright bad"],
    ]
    for kind in ("saved", "begun", "bad"):  # of the colour that it explains
        line, key = page.evaluate(COLOURS, kind)
        assert line == key != ""


def test_two_jobs_are_compared(tab: Any, own: Studio) -> None:
    for name, rate, width in (("one", 1e-3, 64), ("two", 3e-4, 64)):
        job = {
            "run": {"steps": 5, "folder": name},
            "model": {"width": width},
            "optimizer": {"lr": rate, "betas": [0.9, 0.95]},
        }
        if name == "two":
            job["evaluation"] = {"every_steps": 10}
        RunFolder.create(own.runs.root / name, "", job, ["meshwright"])
    page = tab("#runs?run=one", server=own)
    page.wait_for_selector("#list tbody tr:has-text('two')")
    assert page.is_disabled("#compare-runs")
    page.check("[aria-label='draw two']")
    page.click("#compare-runs")
    page.wait_for_selector("#compare tbody tr")
    rows = page.eval_on_selector_all(
        "#compare tbody tr", "rows => rows.map(r => [...r.children].map(c => c.textContent))"
    )
    heads = page.eval_on_selector_all("#compare thead th", "all => all.map(e => e.textContent)")
    first, second = (heads.index(name) for name in ("one", "two"))
    assert {row[0]: (row[first], row[second]) for row in rows} == {
        "optimizer.lr": ("0.001", "0.0003"),
        "evaluation.every_steps": ("—", "10"),
    }
    assert "3 settings are the same" in page.inner_text("#compare-note")
    page.wait_for_function("() => document.activeElement.id === 'compare-title'")
    shared = tab("#" + page.url.partition("#")[2], server=own)
    shared.wait_for_selector("#compare tbody tr:has-text('optimizer.lr')")
    page.click("#compare-close")
    page.wait_for_selector("#compare", state="hidden")
    RunFolder.create(own.runs.root / "three", "", {"optimizer": {"lr": 1e-4}}, ["meshwright"])
    shared.route("**/api/settings*", lambda route: route.fulfill(status=200, content_type="text/html", body="gone"))
    shared.check("[aria-label='draw three']")
    shared.wait_for_selector("#compare-note:has-text('does not respond')")
    assert shared.locator("#compare tbody tr").count() == 0  # no table of the runs before
    shared.unroute("**/api/settings*")
    shared.wait_for_selector("#compare tbody tr:has-text('0.0001')")


def test_notes_are_kept_in_the_run_folder(tab: Any, own: Studio) -> None:
    run = make_run(own.runs.root / "noted", steps=5, ended=None)
    make_run(own.runs.root / "other", steps=5)
    page = tab("#runs?show=noted", server=own, expected="400 (Bad Request)")  # of the note that is refused
    page.wait_for_selector("#run-title:has-text('noted')")
    page.fill("#note", "lr too high <b>\nlooked at it twice")
    for step in range(6, 9):
        run.metric(metric(step))
    page.wait_for_selector("#list tr:has-text('noted') td:nth-child(4):has-text('8')")  # a poll does not take it away
    assert page.input_value("#note").startswith("lr too high")
    page.click("#list button:has-text('other')")
    page.wait_for_selector("#list tr:has-text('noted') small:has-text('lr too high <b>')")
    assert (run.path / "notes.txt").read_text() == "lr too high <b>\nlooked at it twice"
    page.wait_for_function("() => document.getElementById('note').value === ''")
    (run.path / "notes.txt").write_text("by hand")
    page.click("#list button:has-text('noted')")
    page.wait_for_function("() => document.getElementById('note').value === 'by hand'")
    (run.path / "notes.txt").write_text("by somebody else")
    page.fill("#note", "mine")
    page.focus("#find")
    page.wait_for_selector("#note-status.error:has-text('changed elsewhere')")
    assert (run.path / "notes.txt").read_text() == "by somebody else"
