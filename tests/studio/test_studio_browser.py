"""The studio in a real Chromium: plans by clicking, runs that grow, narrow and wide, light and dark, by keyboard."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from studio_runs import SHOTS, make_run, metric, planned

from meshwright.studio import Studio

pytestmark = [pytest.mark.browser, pytest.mark.thorough]
CURVES = "() => [...document.querySelectorAll('[data-field=loss] path')].map(p => p.getAttribute('d')).join()"
"""What the curves of losses look like now."""


def test_plans_by_clicking(tab: Any, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """Three models on three machines: bars and schedule change, the address holds it, the job is one that verifies.

    Its blocks are left uncompiled: that they may be compiled in such a layout is a line of the matrix, and takes longer
    than all of this.
    """
    page = tab()
    seen = []
    for model, gpu, nodes, gpus in (
        ("llama-2-13b", "rtx-3090", "4", "8"),
        ("gpt2-xl", "a100-40gb", "1", "4"),
        ("gpt2", "v100-sxm-16gb", "1", "2"),
    ):
        page.select_option("[name=model]", model)
        page.select_option("[name=gpu]", gpu)
        page.fill("[name=nodes]", nodes)
        page.fill("[name=gpus]", gpus)
        page.fill("[name=seq]", "1024")
        page.fill("[name=batch]", "65536")
        seen.append(planned(page))
        assert f"model={model}" in page.url and f"gpu={gpu}" in page.url
    bars = [re.findall(r'<rect class="(?:mem|time)[^>]*>', pictures) for pictures in seen]
    assert len({str(one) for one in bars}) == 3
    gantts = [re.search(r'class="picture gantt".*?</figure>', pictures, re.S) for pictures in seen]
    assert gantts[0] and gantts[0][0].count("<path") >= 4 and re.search("1f1b|interleaved", gantts[0][0])
    assert gantts[2] and "One stage" in gantts[2][0]
    before = page.inner_text("#chosen-title")
    page.click("#layouts tbody tr:nth-child(2) button")
    page.wait_for_function(f"() => document.getElementById('chosen-title').textContent !== {before!r}")
    with page.expect_download() as download:
        page.click("#download")
    job = tmp_path / "job.toml"
    download.value.save_as(job)
    assert job.read_text() == page.inner_text("#job") and "planned for 2xv100-sxm-16gb" in job.read_text()
    proven = cli("verify", str(job), "--set", "run.compile=false")
    assert proven.code == 0, proven.out + proven.err

    shared = tab("#" + page.url.partition("#")[2])
    planned(shared)
    assert shared.inner_text("#chosen-title") == page.inner_text("#chosen-title")


def test_a_run_appears_and_its_curve_grows(tab: Any, studio: Studio) -> None:
    page = tab("#runs")
    page.wait_for_selector("#list tbody tr")
    assert "appears" not in page.inner_text("#list")
    run = make_run(studio.runs.root / "it-appears", steps=5, ended=None)
    page.wait_for_selector("#list tbody tr:has-text('it-appears')")
    page.check("[aria-label='draw it-appears']")
    page.click("button:has-text('it-appears')")
    page.wait_for_selector("#log-text:has-text('warming up')")
    before = page.evaluate(CURVES)
    for step in range(6, 40):
        run.metric(metric(step, loss=1.0))
    with (run.path / "logs" / "rank-1.err").open("a") as log:
        log.write("a line <b>more</b>\n")
    page.wait_for_function(f"() => ({CURVES})() !== {before!r}")
    page.wait_for_selector("#log-text:has-text('a line <b>more</b>')")
    page.wait_for_selector("#list tbody tr:has-text('it-appears') td:nth-child(4):text-is('39')")
    run.event("stop", reason="failed", error="x")
    page.wait_for_selector("#list tbody tr:has-text('it-appears') .state.failed")
    page.wait_for_selector("#events tbody tr:has-text('stop')")
    for axis in ("tokens", "time"):
        page.check(f"[name=x][value={axis}]")
        page.wait_for_function(f"() => location.hash.includes('x={axis}')")


JOB = """
[model]
preset = "tiny-llama"
width = 32
layers = 1
heads = 2
kv_heads = 1
head_dim = 16
ffn_width = 64
[data]
sources = ["builtin:synthetic"]
[batch]
sequence_length = 16
global_batch = 2
micro_batch = 2
[run]
steps = 200
"""


def test_a_real_training_is_followed_to_its_end(tab: Any, studio: Studio, tmp_path: Path) -> None:
    """It is stopped in its first steps until the page has drawn them: the rest must appear on the page afterwards."""
    page = tab("#runs")
    page.wait_for_selector("#list tbody tr")
    (tmp_path / "job.toml").write_text(JOB, encoding="utf-8")
    folder = studio.runs.root / "trained"
    command = [sys.executable, "-m", "meshwright", "train", "job.toml", "--set", f"run.folder={folder}"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as training:
        assert training.stderr is not None
        while not (folder / "metrics.jsonl").is_file() or not (folder / "metrics.jsonl").stat().st_size:
            assert training.poll() is None, training.stderr.read().decode()
            time.sleep(0.002)
        training.send_signal(signal.SIGSTOP)
        page.click("#none")
        page.check("[aria-label='draw trained']")
        page.wait_for_selector("#list tbody tr:has-text('trained') .state.running")
        page.wait_for_selector("[data-field=loss] svg[aria-label*='latest trained']")
        before = page.evaluate(CURVES)
        training.send_signal(signal.SIGCONT)
        page.wait_for_function(f"() => ({CURVES})() !== {before!r}")
        assert training.wait() == 0, training.stderr.read().decode()
    page.wait_for_selector("#list tbody tr:has-text('trained') .state.done")
    assert page.inner_text("#list tbody tr:has-text('trained') td:nth-child(4)") == "200"


PLACES = {
    "plan": "#plan?model=llama-2-13b&gpu=rtx-3090&nodes=4&gpus=8&seq=1024&batch=65536",
    "runs": "#runs?run=first&run=second&show=first",
    "learn": "#learn?page=playbook/pipeline-parallelism&at=numbers",
}


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1600, "light")])
def test_narrow_and_wide(tab: Any, width: int, scheme: str) -> None:
    """Nothing scrolls sideways, nothing lies on something else, and axe finds nothing serious for people with aids."""
    from axe_playwright_python.sync_playwright import Axe

    for name, place in PLACES.items():
        page = tab(place, width=width, color_scheme=scheme)
        if name == "plan":
            planned(page)
        page.wait_for_selector({"plan": "#pictures figure", "runs": "#events tbody tr", "learn": "#page img"}[name])
        page.screenshot(path=SHOTS / f"{name}-{width}-{scheme}.png", full_page=name != "learn")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.evaluate(OVERLAPS) == [], name
        found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
        assert serious == [], name


OVERLAPS = """() => {
  const kinds = 'button, a, input, select, h1, h2, h3, p, th, td, summary, legend, svg text';
  const shown = [...document.querySelectorAll(kinds)]
    .filter(e => e.checkVisibility() && !e.closest('.hidden') && e.textContent + (e.value || '') !== '');
  const boxes = shown.map(e => {
    if (['INPUT', 'SELECT', 'BUTTON', 'A'].includes(e.tagName)) return e.getBoundingClientRect();
    const range = document.createRange(); range.selectNodeContents(e); return range.getBoundingClientRect();
  });
  const found = [];
  for (let i = 0; i < shown.length; i += 1) for (let j = i + 1; j < shown.length; j += 1) {
    const a = boxes[i], b = boxes[j];
    const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (x <= 3 || y <= 3) continue;
    const together = shown[i].contains(shown[j]) || shown[j].contains(shown[i]);
    const scrolled = shown[i].closest('.scroll, pre') !== shown[j].closest('.scroll, pre');
    if (together || scrolled) continue;
    found.push([shown[i].outerHTML.slice(0, 90), shown[j].outerHTML.slice(0, 90)]);
  }
  return found.slice(0, 5);
}"""


def test_by_keyboard(tab: Any) -> None:
    """Every control is reached in the order it stands, says what it is, and shows that it has the focus."""
    page = tab("#plan?model=gpt2&gpu=a100-40gb&nodes=1&gpus=2&seq=1024&batch=65536")
    planned(page)
    order = []
    for _ in range(40):
        page.keyboard.press("Tab")
        told = page.evaluate(
            """() => { const e = document.activeElement, s = getComputedStyle(e), b = e.getBoundingClientRect();
            return {name: (e.labels?.[0]?.textContent || e.getAttribute('aria-label') || e.textContent || '').trim(),
            ring: s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2, y: b.top + scrollY, x: b.left,
            id: e.id || e.name || e.className, body: e === document.body}; }"""
        )
        if told["body"]:
            break
        order.append(told)
    assert len(order) > 15
    assert [one["id"] for one in order if not one["name"]] == []
    assert [one["id"] for one in order if not one["ring"]] == []
    side = [one["y"] for one in order if one["id"] in ("model", "config", "cluster", "gpu", "nodes", "seq", "batch")]
    assert side == sorted(side) and len(side) == 7
    page.focus("#layouts tbody tr:nth-child(2) button")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "() => document.querySelector('#layouts tr:nth-child(2)').getAttribute('aria-selected') === 'true'"
    )


def test_pages_are_found_again_as_they_were_left(tab: Any) -> None:
    page = tab("#plan?model=gpt2&gpu=a100-40gb&nodes=1&gpus=2&seq=1024&batch=65536")
    planned(page)
    page.click("nav >> text=Learn")
    page.wait_for_selector("#page h2:has-text('Start here')")
    page.click("nav >> text=Plan")
    planned(page)
    assert page.input_value("[name=model]") == "gpt2" and page.input_value("[name=seq]") == "1024"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("#plan?model=no-such-model", "no-such-model"),
        ("#plan?gpu=no-such-gpu", "no-such-gpu"),
        ("#plan?shape=%7Bcut", ""),
    ],
)
def test_an_address_that_cannot_be_meant(tab: Any, place: str, words: str) -> None:
    """A name nobody knows is refused by name and not replaced by another; what is cut counts as not given."""
    page = tab(place)
    page.wait_for_selector(f"#plan-status.error:has-text('{words}')" if words else "#layouts tbody tr")


def test_on_a_phone_every_number_of_a_layout_is_seen(tab: Any) -> None:
    page = tab("#plan?model=llama-2-13b&gpu=rtx-3090&nodes=4&gpus=8&seq=1024&batch=65536", width=390)
    planned(page)
    hidden = (
        "() => [...document.querySelectorAll('#layouts td')].filter(e => e.getBoundingClientRect().right > 390).length"
    )
    assert page.evaluate(hidden) == 0
    small = "() => [...document.querySelectorAll('#pictures .bars svg')].map(e => e.clientWidth)"
    assert max(page.evaluate(small)) <= 390


def test_a_config_is_uploaded(tab: Any, tmp_path: Path) -> None:
    page = tab("#plan?gpu=a100-40gb&nodes=1&gpus=2&seq=512&batch=65536")
    page.wait_for_selector("#layouts tbody tr")
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 768, "num_hidden_layers": 12, '
        '"num_attention_heads": 12, "intermediate_size": 2048, "vocab_size": 32000, "max_position_embeddings": 2048, '
        '"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false}'
    )
    page.set_input_files("[name=config]", str(config))
    page.wait_for_function("() => location.hash.includes('shape=')")
    page.wait_for_function("() => /^1\\d\\d(\\.\\d)?M/.test(document.getElementById('size').textContent)")
    config.write_text("not json <img src=x onerror=alert(1)>")
    page.set_input_files("[name=config]", str(config))
    page.wait_for_selector("#upload.error:has-text('cannot be used')")
