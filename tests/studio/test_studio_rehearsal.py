"""A rehearsal in a report and in the studio's list: its figures, its warnings, and others' text as text alone."""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rehearsals import ALONE, SHORT, WHOLE, saved
from studio_runs import SHOTS, make_run

from meshwright.rehearse import Rehearsal
from meshwright.studio import Studio, write_report
from meshwright.studio.runs import Runs

NASTY = "<script>alert('x')</script>"


def html_of(rehearsal: Rehearsal, folder: Path) -> str:
    return write_report(saved(folder / "rehearsed", rehearsal)).read_text(encoding="utf-8")


def test_the_report_has_the_figures(tmp_path: Path) -> None:
    html = html_of(WHOLE, tmp_path)
    assert re.findall(r'<figure class="picture (\w+)">', html) == ["memory", "breakdown", "compute", *["messages"] * 4]
    assert 'aria-label="Memory of each kind of rank"' in html and 'aria-label="Time of the cluster’s step"' in html
    for title in ("planned: working weights, 5 GiB", "rehearsed: activations, 26.5 GiB", "logits and loss, 4 GiB"):
        assert f"<title>{title}</title>" in html or f"planned: {title}</title>" in html
    assert "<title>pipeline bubble: 600 ms, 16.0%, modelled</title>" in html
    for words in (
        "rank 48 of 64 (last stage)",
        "8.75 GiB",
        "-0.6%",
        "76.7%",
        "279,620",
        "Warning: rank 48",
        "8x8xh100",
    ):
        assert words in html
    assert "What a rehearsal cannot show" in html and "val_loss" not in html.partition("<h2>Job</h2>")[0]
    assert not re.search(r"""(?:src|href|action|srcset)\s*=|url\(|@import|https?:|["'(]//""", html)


def test_bars_are_as_long_as_what_they_stand_for(tmp_path: Path) -> None:
    html = html_of(ALONE, tmp_path)
    broad = html.partition('class="broad"')[2].partition("</svg>")[0]
    rects = re.findall(r'width="([\d.]+)" height="16"><title>(\w+): ', broad)
    planned, rehearsed = (sum(float(width) for width, word in rects if word == one) for one in ("planned", "rehearsed"))
    assert rehearsed / planned == pytest.approx(71.5 / 71.0625, rel=1e-3)
    assert "breakdown" not in re.findall(r'<figure class="picture (\w+)">', html)  # one rank makes no step


def test_a_rank_that_did_not_fit_is_an_alarm(tmp_path: Path) -> None:
    html = html_of(SHORT, tmp_path)
    assert '<p class="note alarm">Out of memory: rank 48 of 64 (last stage) needs 84.1 GiB' in html
    assert "<title>rehearsed: needed, out of memory, 84.1 GiB</title>" in html and "planned: unknown" in html
    known = replace(SHORT, ranks=(replace(SHORT.ranks[3], memory=WHOLE.ranks[3].memory),))
    html = html_of(known, tmp_path / "known")
    assert "<title>rehearsed: needed, out of memory, 8.6 GiB</title>" in html and "planned: logits and loss" in html
    assert 'class="picture memory"' not in html_of(replace(SHORT, ranks=()), tmp_path / "none")


def test_small_ones_are_in_a_unit_that_can_be_read(tmp_path: Path) -> None:
    memory = ALONE.ranks[0].memory
    assert memory is not None
    kept = {kind: value // 1024 for kind, value in memory.by_kind.items()}
    small = replace(memory, allocated_bytes=sum(kept.values()), by_kind=kept, planned_terms={}, planned_bytes=None)
    html = html_of(replace(ALONE, ranks=(replace(ALONE.ranks[0], memory=small),)), tmp_path)
    assert "MiB allocated at the peak" in html and ">71.5<" in html and "planned: unknown" in html


def test_what_others_wrote_is_text(tmp_path: Path) -> None:
    first = WHOLE.ranks[0]
    assert first.memory is not None
    nasty = replace(
        first, phases_s={NASTY: 1.0}, memory=replace(first.memory, by_kind={NASTY: 1}, planned_terms={NASTY: 1.0})
    )
    nasty = replace(nasty, messages=(replace(first.messages[0], kind=NASTY, axis=NASTY),))
    step = replace(WHOLE.step, phases_s={NASTY: 1.0}) if WHOLE.step else None
    given = replace(WHOLE, ranks=(nasty,), step=step, warnings=(NASTY,), limits=(NASTY,), cluster=NASTY, device=NASTY)
    html = html_of(given, tmp_path)
    assert NASTY not in html and "&lt;script&gt;alert" in html


def test_the_list_has_rehearsals_as_their_own_kind(tmp_path: Path) -> None:
    make_run(tmp_path / "trained", steps=3)
    saved(tmp_path / "rehearsed")
    runs = Runs(tmp_path)
    kinds = {line["name"]: (line["kind"], line["state"]) for line in runs.listed()}
    assert kinds == {"trained": ("training", "done"), "rehearsed": ("rehearsal", "rehearsed")}
    assert "Memory of each kind of rank" in runs.shown("rehearsed")["rehearsal"]
    assert runs.shown("trained")["rehearsal"] == ""
    (tmp_path / "rehearsed" / "rehearsal.json").write_text("[]")
    assert "rehearsal.json is damaged (it is not a table of fields)" in runs.shown("rehearsed")["rehearsal"]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Studio]:
    """A studio of a training and two rehearsals; its planner is never asked."""
    make_run(tmp_path / "trained", steps=3)
    saved(tmp_path / "rehearsed")
    saved(tmp_path / "short", SHORT)
    server = Studio(tmp_path)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.close()


@pytest.mark.browser
@pytest.mark.thorough
def test_a_rehearsal_is_opened_with_its_pictures(tab: Any, own: Studio) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = tab("#runs", server=own)
    page.wait_for_selector("#list .state.rehearsed")
    assert page.locator("#list input[type=checkbox]").count() == 1  # only the training has curves
    page.click("#list button:has-text('rehearsed')")
    page.wait_for_selector("#rehearsal .picture.memory svg")
    assert page.locator("#rehearsal svg.broad rect[class*=modelled]").count() == 2
    assert page.locator("#rehearsal svg.broad").first.is_visible()
    assert page.inner_text("#predicted") == ""
    page.screenshot(path=SHOTS / "rehearsal.png", full_page=True)
    phone = tab("#runs?show=rehearsed", width=390, color_scheme="dark", server=own)
    phone.wait_for_selector("#rehearsal svg.narrow rect")
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    found = Axe().run(phone, options={"resultTypes": ["violations"]}).response["violations"]
    assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
    page.click("#list button:has-text('short')")
    page.wait_for_selector("#rehearsal .alarm:has-text('rank 48 of 64 (last stage) needs 84.1 GiB')")
    page.click("#list button:has-text('trained')")
    page.wait_for_selector("#run-title:has-text('trained')")
    assert page.inner_html("#rehearsal") == ""
