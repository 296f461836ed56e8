"""Answers to the planning page, and a plan as a file."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from meshwright.studio.confined import Outside
from meshwright.studio.learn import guide_page, guide_picture, guide_titles
from meshwright.studio.markdown import to_html
from meshwright.studio.planner import Planner

STATE = {"model": "llama-2-7b", "nodes": 2, "gpus": 8, "gpu": "rtx-4090", "seq": 1024, "batch": 65536}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
}


def test_layouts_and_their_pictures() -> None:
    planner = Planner()
    found = planner.answer({"part": "search", **STATE, "full": True})
    assert found["whole"] and found["batch"] == 64 and len(found["rows"]) == 10
    steps = [row["step_s"] for row in found["rows"]]
    assert steps == sorted(steps)
    piped = next(row for row in found["rows"] if " pp " in row["layout"])
    one = planner.answer({"part": "layout", **STATE, "pick": piped["pick"]})
    for kind in ("memory", "breakdown", "gantt", "mesh"):
        assert f'class="picture {kind}"' in one["pictures"]
    ranks = int(re.findall(r" pp (\d+)", piped["layout"])[0])
    assert one["pictures"].count('class="idle"') == ranks and "Scaling" in one["pictures"]
    assert one["title"] == piped["layout"] and one["title"] in one["job"]
    words = [each["command"] for each in one["commands"]]
    assert "meshwright plan --check job.toml" in words and "meshwright report job.toml --out plan.html" in words
    assert tomllib.loads(one["job"])["cluster"] == {"nodes": 2, "gpus_per_node": 8, "gpu": "rtx-4090"}
    assert "style=" not in one["pictures"]  # the page's policy would not let it act


def test_a_quick_answer_is_said_not_to_be_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.studio.planner.QUICK_S", 0.0)
    planner = Planner(interrupted=lambda: False)
    quick = planner.answer({"part": "search", **STATE})
    assert not quick["whole"] and len(quick["rows"]) == 1
    assert planner.answer({"part": "search", **STATE, "full": True})["rows"][0]["step_s"] <= quick["rows"][0]["step_s"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "nothing"}, 'model.preset = "nothing" is not known'),
        ({"gpu": "h1000; rm -rf"}, "--cluster = 2x8xh1000; rm -rf is not understood"),
        ({"nodes": 10**9}, "nodes = 1000000000 is not a whole number from 1 to 1024"),
        ({"nodes": True}, "nodes = True is not a whole number"),
        ({"seq": 1 << 19}, "is longer than the model's max_sequence_length"),
        ({"shape": {"layers": 10**6}}, "layers = 1000000 is not a whole number from 1 to 256"),
        ({"shape": {"heads": 7, "kv_heads": 2}}, "model.kv_heads = 2 does not divide model.heads = 7"),
        ({"shape": {"file": "/etc/passwd"}}, "shape has fields that no plan depends on"),
        ({"shape": {"norm": "<b>"}}, "norm"),
        ({"network_link": -1}, "network_link = -1 is not a rate"),
        ({"allow": ["x"]}, "which is not an option"),
        ({"part": "layout", "pick": "x"}, "pick is not a layout from this page"),
        ({"part": "layout", "pick": '{"micro_batch": 1, "data": {}}'}, "pick is not a layout from this page"),
        ({"part": "layout", "pick": '{"micro_batch": 1, "layout": {"tp": "x"}}'}, "pick is not a valid layout"),
        ({"part": "layout", "pick": '{"micro_batch": 1, "layout": {"tp": 2}}'}, "layout needs 2 ranks"),
        ({"part": "config", "config": {"model_type": "bert"}}, "bert"),
        ({"part": "config", "config": [1]}, "config is not a JSON object"),
        ({"part": "config", "config": {**LLAMA, "hidden_size": -8}}, "hidden_size = -8"),
        ({"part": "nothing"}, "part = nothing is not known"),
    ],
)
def test_mistakes_are_one_sentence(change: dict[str, Any], words: str) -> None:
    answer = Planner().answer({"part": "search", **STATE, **change})
    assert words in answer["error"] and "\n" not in answer["error"]


def test_a_plan_as_a_file(tmp_path: Path, cli: Callable[..., Any]) -> None:
    job = tmp_path / "big.toml"
    job.write_text(
        '# <script>alert(1)</script>\n[model]\npreset = "llama-2-7b"\n[batch]\nsequence_length = 1024\n'
        "global_batch = 64\nmicro_batch = 1\n[layout]\npp = 4\ndp_shard = 4\nzero = 1\n"
        'schedule = "1f1b"\n[run]\ncompile = true\n'
    )
    done = cli("report", str(job), "--cluster", "2x8xrtx-4090", "--json")
    assert done.code == 0, done.err
    page = Path(json.loads(done.out)["report"]).read_text()
    assert len(page.encode()) < 2_000_000 and page.count("<svg") >= 5 and "alert(1)" not in page
    assert not re.search(r"""(?:src|href|action|srcset)\s*=|url\(|@import|https?:|["'(]//""", page)
    wrong = cli("report", str(job), "--cluster", "8xh100")
    assert wrong.code == 2 and "layout needs 16 ranks" in wrong.err
    assert cli("report", str(tmp_path), "--cluster", "8xh100").code == 2
    assert not list(tmp_path.glob(".*.new"))


def test_a_plan_as_a_picture(cli: Callable[..., Any], tmp_path: Path) -> None:
    """By itself: colours by value, nothing from elsewhere; the same file for the same job."""
    asked = ["plan", "--check", "finetune-7b-4xa100", "--cluster", "4xa100-80gb"]
    assert cli(*asked, "--svg", "one.svg").code == 0 and cli(*asked, "--svg", "two.svg", "--json").code == 0
    picture = (tmp_path / "one.svg").read_text()
    assert picture == (tmp_path / "two.svg").read_text()
    ElementTree.fromstring(picture)
    assert "optimizer states" in picture and "recomputation" in picture and "GPU memory: 80 GiB" in picture
    assert "var(" not in picture and "currentColor" not in picture and picture.count("http") == 1
    for wrong in (["--scale", "4"], ["--svg", "nowhere/x.svg"]):
        done = cli(*asked, "--svg", "three.svg", *wrong)
        assert done.code == 2 and "--svg" in done.err and not (tmp_path / "three.svg").exists()


def test_the_guide_is_escaped_and_its_links_stay_inside() -> None:
    assert {"plan", "runs", "studio", "playbook/zero"} <= set(guide_titles())
    assert '<a href="#learn?page=layouts&amp;at=the-zero-stages">' in guide_page("playbook/zero")
    assert '<a href="#learn?page=playbook/zero">' in guide_page("playbook/data-parallelism")
    assert '<img src="guide/playbook/images/1f1b.svg"' in guide_page("playbook/pipeline-parallelism")
    assert guide_picture("playbook/images/1f1b.svg").startswith(b"<svg")
    for outside in ("../../pyproject.toml", "playbook/README.md", "/etc/passwd"):
        with pytest.raises(Outside):
            guide_picture(outside)
    for name in guide_titles():
        html = guide_page(name)
        assert set(re.findall(r'href="(#learn\?page=)?', html)) <= {"#learn?page="}
    text = "# A <b>\n\n`<i>` and **bold** [x](javascript:alert(1)) [y](plan.md)\n\n"
    text += "| a | b |\n|---|---|\n| <u> | 2 |\n\n- one\n"
    html = to_html(text, lambda target: "#y" if target == "plan.md" else None)
    assert "<strong>bold</strong>" in html and "javascript" not in html and '<a href="#y">y</a>' in html
    assert "<td>&lt;u&gt;</td>" in html and "<code>&lt;i&gt;</code>" in html and "A &lt;b&gt;" in html


def test_markdown_leads_nowhere_unsafe_and_shows_no_comments() -> None:
    """Even where the caller would let every target through."""
    odd = ("JavaScript:x", "<java\tscript:x>", "&#9;javascript:x", "java&Tab;script:x")
    for target in ("javascript:x", "data:x", "file:/x", *odd):
        assert "href" not in to_html(f"[words]({target})", str) and "words" in to_html(f"[words]({target})", str)
        assert "src" not in to_html(f"![words]({target})", str, str)
    for target in ("https://a.b/c", "mailto:a@b", "a.md#x:y", "/a?b=c:d"):
        assert to_html(f"[w]({target})", str) == f'<p><a href="{target}">w</a></p>\n'
    comment = to_html(
        "<!-- one\n\ntwo -->\n\nwords <!-- three --> more <script>x</script>\n\n<img src=x onerror=y>\n", str
    )
    assert comment == "\n<p>words  more &lt;script&gt;x&lt;/script&gt;</p>\n&lt;img src=x onerror=y&gt;\n"
    assert to_html("| a \\| b |\n|---|\n| 1 |", str).count("<th ") == 1
    assert "<strong><code>c</code> d</strong>" in to_html("**`c` d**", str)
    assert '<a href="t"><code>c</code></a>' in to_html("[`c`](t)", str) and "<ol>\n<li>x</li>" in to_html("1. x", str)
    assert '<pre tabindex="0"><code>a &amp; b\n' in to_html("```sh\na & b\n```", str)
    assert '<img src="p&amp;q" alt="&lt;" />' in to_html("![<](p&q)", str, str)
