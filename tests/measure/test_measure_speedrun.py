"""Time to a loss: every system on the same sequences, judged by the same held-out ones, timed by the same rule."""

import json
import runpy
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> Any:
    """A script's functions, with the folders importable as they are when run."""
    folders = [str(BENCHMARKS), str(BENCHMARKS / "peers")]
    sys.path[:0] = folders
    try:
        return Namespace(**runpy.run_path(str(BENCHMARKS / name)))
    finally:
        for folder in folders:
            sys.path.remove(folder)


@pytest.fixture(scope="module")
def speedrun() -> Any:
    """The command."""
    return script("speedrun.py")


@pytest.mark.thorough
def test_a_tiny_run_of_ours_and_a_peer(tmp_path: Path, warm_python: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = f"--tiny --systems ours,transformers --steps ours=12 --steps transformers=12 --out {out}".split()
    done = subprocess.run(
        [warm_python, str(BENCHMARKS / "speedrun.py"), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ours, transformers = map(json.loads, out.read_text().splitlines())
    assert [step for step, _ in ours["losses"]] == [10, 12] and ours["seed"] == 0
    assert ours["losses"][-1][1] < 6.2 < np.log(512)  # it has learned something
    if find_spec("accelerate") is None:
        assert "accelerate" in transformers["skipped"]
        return
    assert [step for step, _ in transformers["losses"]] == [10, 12]
    assert transformers["losses"][-1][1] == pytest.approx(np.log(512), abs=0.3)  # it has learned little
    assert "| ours | 0 |" in done.stdout and "| transformers | 0 |" in done.stdout


def test_peers_get_the_sequences_that_our_gpt_2_recipe_reads(speedrun: Any, tmp_path: Path) -> None:
    import meshwright

    (tmp_path / "text.txt").write_text(
        "\n".join(f"{i} squared is {i * i}, and its double is {2 * i}" for i in range(4000))
    )
    asked = Namespace(tiny=True, seed=3, setting=speedrun.TINY, steps={"gpt2": 5}, every={"gpt2": 5}, set=[])
    cache = [f"data.cache={tmp_path / 'cache'}"]
    globals_ = speedrun.write_tokens.__globals__
    usual = globals_["job_fields"]
    globals_["job_fields"] = lambda *given: [*usual(*given), *cache]
    try:
        speedrun.write_tokens(tmp_path / "tokens.npz", tmp_path / "text.txt", asked, 5)
    finally:
        globals_["job_fields"] = usual
    found = np.load(tmp_path / "tokens.npz")
    (tmp_path / "job.toml").write_text("")
    job = meshwright.load_job(str(tmp_path / "job.toml"), [*usual("gpt2", [], tmp_path / "text.txt", asked), *cache])
    loader = iter(meshwright.data.loader(job))
    for step in range(5):
        batch = next(loader).batch
        rows = found["train"][4 * step : 4 * step + 4]
        assert np.array_equal(rows[:, :-1], batch.tokens_BS.numpy())
        assert np.array_equal(rows[:, 1:], batch.labels_BS.numpy())
    assert found["held_out"].shape == (8, 65) and job.run.seed == 3


def test_the_first_steps_count_as_long_as_the_others(speedrun: Any) -> None:
    found = speedrun.timed([(5, 30.0), (10, 5.0), (20, 20.0)], [(10, 3.0), (20, 2.0)])
    assert found["step_s"] == pytest.approx(25 / 15)
    assert found["compile_s"] == pytest.approx(30 - 5 * 25 / 15)
    assert [seconds for seconds, _ in found["curve"]] == pytest.approx([25 / 3 + 5, 25 / 3 + 25])


def test_the_table_compares_medians_and_says_what_was_not_reached(speedrun: Any) -> None:
    def row(run: str, seed: int, *curve: tuple[float, float]) -> dict[str, Any]:
        return {"run": run, "seed": seed, "curve": list(curve), "step_s": 0.1}

    rows = [row("ours", 0, (10, 4.0), (20, 2.9)), row("ours", 1, (10, 4.0), (30, 2.8))]
    rows += [row("gpt2", 0, (40, 3.5), (100, 2.95)), row("gpt2", 1, (40, 3.5), (100, 3.05)), {"run": "x", "failed": ""}]
    by_default, fixed = speedrun.table(rows, None), speedrun.table(rows, 3.0)
    assert "loss 3.0500" in by_default and "| gpt2 | 0 1 | 100.0 | 4.00 |" in by_default
    assert "| ours | 0 1 | 25.0 | 1.00 | 2.8500 |" in fixed
    assert "| gpt2 | 0 1 | 100.0 (1 of 2 not reached) | 4.00 |" in fixed
    assert "| gpt2 | 0 1 | not reached |  |" in speedrun.table(rows, 2.9)


@pytest.mark.thorough
def test_repeated_text_is_kept_once_and_html_loses_its_tags() -> None:
    corpus = script("speedrun_corpus.py")
    seen: set[bytes] = set()
    notice = "This paragraph is the same in every file, and it is longer than sixty characters."
    page = f"<html><head><title>no</title></head><body><p>{notice}</p><p>a &lt; b</p><script>no</script></body></html>"
    assert corpus.cleaned("/a.html", page.encode(), seen, Counter()) == f"{notice}\n\na < b"
    assert corpus.cleaned("/b.txt", f"{notice}\n\n  kept as it is".encode(), seen, Counter()) == "  kept as it is"
    assert corpus.cleaned("/c.txt", b"\xff\xfe", seen, Counter()) == ""
    assert corpus.is_text("/usr/share/man/man1/ls.1.gz") and not corpus.is_text("/usr/share/man/de/man1/ls.1.gz")
    assert not corpus.is_text("/usr/share/doc/x/changelog.gz") and not corpus.is_text("/html/de-DE/page.html")
    assert corpus.fair_share([1, 10, 10], 11) == 5 and corpus.fair_share([1, 2], 11) == float("inf")
