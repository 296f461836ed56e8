"""The report: self-contained, well-formed, escaped, small, and whole in every state of a run."""

import json
import math
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.runs import RunFolder
from meshwright.studio import write_report

NASTY = "<script>alert('x')</script> & \"quoted\" <b>"
VOID = {"meta", "br", "link", "img", "input", "hr"}
START = {"device": "NVIDIA H200", "parameters": 22_100_000, "flops_per_token": 1.4e8, "gpu": "h200"}


class Balance(HTMLParser):
    """Fails on a tag that closes another one, and collects what the page shows as text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def new_run(path: Path, raw: str = "[run]\nsteps = 3\n") -> RunFolder:
    return RunFolder.create(path, raw, {"run": {"steps": 3, "folder": None}, "model": {"width": 64}}, ["meshwright"])


def row(step: int, **fields: object) -> dict[str, object]:
    plain = {"loss": 8.0 / step, "grad_norm": 1.0, "lr": 1e-4, "tokens": 4096 * step, "tokens_per_s": 5000.0}
    return {"step": step, **plain, "mfu": None, "step_s": 0.8, "memory_bytes": 2**30, "attempt": 0, **fields}


def read(run: Path) -> tuple[str, Balance]:
    html = write_report(run).read_text(encoding="utf-8")
    parser = Balance()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    # No address of another file or machine, in any attribute or style; the SVG namespace is not one either.
    assert not re.search(r"""(?:src|href|action|srcset)\s*=|url\(|@import|https?:|["'(]//""", html)
    return html, parser


def test_a_whole_run(tmp_path: Path) -> None:
    run = new_run(tmp_path / "first-run")
    convention = "6·P_matmul + 6·L·S·A (causal attention)"
    run.event("start", **START, flops_convention=convention, gpu_peak_flops=989.4e12)
    for step in range(1, 41):
        run.metric(row(step, mfu=0.4))
    run.metric({"step": 20, "val_loss": 3.5, "attempt": 0})
    run.metric({"step": 40, "val_loss": 3.75, "attempt": 0})
    run.sample(40, "once upon a time")
    run.event("stop", reason="finished", step=40)
    html, parsed = read(tmp_path / "first-run")
    for words in (
        "first-run",
        "finished",
        "22.1M parameters",
        "NVIDIA H200",
        "3.7500",
        "best 3.5000 at step 20",
        "40.0%",
    ):
        assert words in parsed.text
    for words in (convention, "164K", "5,000", "once upon a time", "validation loss", "smoothed", "tokens/s", "GiB"):
        assert words in parsed.text
    assert html.count("<svg") == 6  # loss, throughput, MFU, gradient norm, learning rate, memory
    assert "@media (prefers-color-scheme:dark)" in html and "@media print" in html


def test_before_the_first_step(tmp_path: Path) -> None:
    new_run(tmp_path / "run")
    html, parsed = read(tmp_path / "run")
    assert "No step has been recorded yet" in parsed.text and "running" in parsed.text and "<svg" not in html
    os.utime(tmp_path / "run" / "metrics.jsonl", (0, 0))  # and nothing since: it was killed
    assert "silent" in read(tmp_path / "run")[1].text


def test_one_step_is_a_dot_and_unknown_hardware_has_no_mfu(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.event("start", device="CPU", parameters=1000, gpu=None, gpu_peak_flops=None, flops_convention="6·P")
    run.metric(row(1))
    html, parsed = read(tmp_path / "run")
    assert "unknown hardware" in parsed.text and "no validation in this run" in parsed.text
    assert "<circle" in html and 'class="line' not in html


def test_losses_that_are_not_finite_are_gaps_and_said(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    for step in range(1, 11):
        run.metric(row(step, loss=math.nan if step in (4, 5) else math.inf if step == 6 else 2.0 + step / 10))
    html, parsed = read(tmp_path / "run")
    assert "3 steps without a finite loss, the first at step 4" in parsed.text
    assert html.count('class="bad"') == 3
    (loss,) = re.findall(r'<path class="line plain" d="([^"]*)"', html)[:1]
    assert loss.count("M") == 2  # before and after
    figures = html.partition("<h2>Events</h2>")[0]  # behind it stands code, which may speak of NaN
    assert not re.search(r"\bnan\b|\binf\b", figures, flags=re.I)


def test_nothing_but_nan(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    for step in range(1, 30):
        run.metric(row(step, loss=math.nan))
    _, parsed = read(tmp_path / "run")
    assert "No finite value was recorded" in parsed.text and "never finite" in parsed.text


def test_everything_from_outside_is_escaped(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run & <i>co", raw=f"# {NASTY}\n[run]\nsteps = 3\n")
    run.event("start", device=NASTY, flops_convention=NASTY, gpu_peak_flops=1e12, parameters=5)
    run.event(NASTY, **{NASTY: NASTY, "nested": {NASTY: [NASTY]}})
    run.metric(row(1, mfu=0.1))
    run.sample(1, NASTY)
    (run.path / "code.diff").write_text(NASTY)
    html, parsed = read(run.path)
    assert "<script>alert" not in html and NASTY in parsed.text
    assert "b" not in parsed.seen and "<i>co" not in html


def test_a_restart_overrides_the_steps_it_did_again_and_is_marked(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    for step in (1, 2, 3, 4):
        run.metric(row(step, loss=9.0))
    for step in (3, 4, 5):
        run.metric(row(step, loss=1.25, attempt=1))
    html, parsed = read(tmp_path / "run")
    assert "1.2500" in parsed.text
    assert html.count('class="mark"') == html.count("<svg")
    assert '"y":[9.0,9.0,1.25,1.25,1.25]' in html


@pytest.mark.thorough
def test_a_long_run_stays_small_and_keeps_its_spikes(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    noise = random.Random(0)
    with (run.path / "metrics.jsonl").open("w") as metrics:
        for step in range(1, 100_001):
            loss = 77.7 if step == 54_321 else 2.0 + noise.random()
            random_row = row(step, loss=loss, grad_norm=noise.random(), tokens_per_s=5000 * noise.random(), mfu=0.4)
            metrics.write(json.dumps(random_row) + "\n")
    for step in range(300):
        run.event("checkpoint", step=step)
        run.sample(step, "word " * 5000)
    html, parsed = read(tmp_path / "run")
    assert len(html.encode()) < 2_000_000
    assert "77.7" in html and "events not shown" in parsed.text and "of 299 earlier samples" in parsed.text


def test_other_place_and_other_folder(tmp_path: Path) -> None:
    new_run(tmp_path / "run")
    assert write_report(tmp_path / "run", tmp_path / "page.html") == tmp_path / "page.html"
    assert not (tmp_path / "run" / "report.html").exists()
    with pytest.raises(UserError, match="is not a run folder"):
        write_report(tmp_path)
    with pytest.raises(UserError, match=r"nowhere/page\.html cannot be written .* with --out"):
        write_report(tmp_path / "run", tmp_path / "nowhere" / "page.html")


def test_a_note_is_shown_as_text_and_a_link_is_not_followed(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run").path
    assert "Notes" not in read(run)[1].text
    (run / "notes.txt").write_text(NASTY)
    html, page = read(run)
    assert NASTY in page.text and NASTY not in html
    (tmp_path / "secret").write_text("the secret")
    (run / "notes.txt").unlink()
    (run / "notes.txt").symlink_to(tmp_path / "secret")
    assert "the secret" not in read(run)[0]
