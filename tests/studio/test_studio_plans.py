"""Answers to the planning page, and a plan as a file."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from meshwright.cost import parameter_count
from meshwright.job import Model, model_preset, model_to_hf_config
from meshwright.studio.confined import Outside
from meshwright.studio.learn import guide_page, guide_picture, guide_titles
from meshwright.studio.markdown import to_html
from meshwright.studio.mesh import mesh
from meshwright.studio.plan_request import SHAPE, asked
from meshwright.studio.planner import Planner
from meshwright.studio.server import choices

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
EXPERTS = {"count": 8, "top_k": 2, "ffn_width": 64}


@pytest.mark.thorough
def test_layouts_and_their_pictures() -> None:
    planner = Planner()
    found = planner.answer({"part": "search", **STATE, "full": True})
    assert found["whole"] and found["batch"] == 64 and len(found["rows"]) == 10
    for row in found["rows"]:
        for value, between in (("tokens_per_s_per_gpu", "interval"), ("gib", "gib_interval")):
            assert row[between][0] < row[value] < row[between][1]
    assert found["rows"][0]["tie"]
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
    assert {"meshwright plan --check job.toml", "meshwright rehearse job.toml --each-stage"} <= {*words}
    assert "meshwright report job.toml --out plan.html" in words
    assert """meshwright submit job.toml --set 'data.sources=["texts"]' --site leonardo""" in words
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
        ({"model": "nothing"}, 'Preset = "nothing" is not known; choose one of 10b, deepseek-v2-lite, '),
        ({"model": "llama-3-9b"}, "did you mean llama-3-8b or llama-"),
        ({"model": "dbrx-base"}, 'Preset = "dbrx-base" is a mixture of experts of a family that'),
        (
            {"seq": "8k"},
            "Sequence = 8k is not a number of tokens; write out a length: k may be 1,000 or a power of two",
        ),
        ({"batch": "1.5"}, "Batch = 1.5 is not a number of tokens; write a whole number as 15T, 2e12 or 1400000"),
        ({"batch": "1e30"}, "is not a whole number from 16 to 268,435,456"),
        ({"gpu": "h1000; rm -rf"}, "GPU = h1000; rm -rf is not known; choose one from the list"),
        ({"nodes": 10**9}, "Nodes = 1000000000 is not a whole number from 1 to 4,096"),
        ({"nodes": True}, "Nodes = True is not a whole number"),
        ({"seq": 1 << 19}, "Sequence = 524288 is longer than the model's longest sequence"),
        ({"nodes": 1024, "batch": 1024}, "Batch gives 1 sequences a step, which no layout spreads evenly over 8192"),
        ({"shape": {"layers": 10**6}}, "layers = 1000000 is not a whole number from 1 to 256"),
        ({"shape": {"heads": 7, "kv_heads": 2}}, "kv heads = 2 does not divide heads = 7"),
        ({"shape": {"experts": EXPERTS | {"count": 0}}}, "experts = 0 is not a whole number from 1 to 4,096"),
        ({"shape": {"experts": EXPERTS | {"top_k": 9}}}, "experts per token = 9 is more than experts = 8; lower it"),
        ({"shape": {"experts": 8}}, "experts: Input should be a valid dictionary"),
        ({"tokens": "many"}, "Tokens = many is not an amount above 0; write it as 15T"),
        ({"tokens": "0"}, "Tokens = 0 is not an amount above 0"),
        ({"tokens": "1e30"}, "Tokens = 1e30 is not an amount"),
        ({"days": -1}, "Days = -1 is not an amount above 0"),
        ({"price": 2}, "Price is of a whole training; give its Tokens or Days, too"),
        ({"shape": {"file": "/etc/passwd"}}, "shape has fields that no plan depends on"),
        ({"shape": {"norm": "<b>"}}, "norm"),
        ({"network_link": -1}, "Network = -1 is not a rate"),
        ({"allow": ["x"]}, "Allowed has 'x', which is not an option"),
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
    assert not re.search(r"--[a-z]|\b(model|layout|batch|cluster)\.[a-z]", answer["error"])  # the page has no options


def test_numbers_of_tokens_are_read_as_people_write_them() -> None:
    small = {"part": "search", "model": "gpt2", "nodes": 1, "gpus": 1, "gpu": "h100", "full": True}
    plain = Planner().answer({**small, "seq": 1024, "batch": 2_097_152, "tokens": 15 * 10**12})
    written = Planner().answer({**small, "seq": "1024", "batch": "2.097152M", "tokens": "15T"})
    assert written["rows"] == plain["rows"] and written["training"] == plain["training"]
    assert (written["batch_tokens"], written["sequence"]) == (2_097_152, 1024)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seq": "8k"}, "seq"),
        ({"model": "nothing"}, "model"),
        ({"gpu": "x"}, "gpu"),
        ({"seq": 1 << 19}, "seq"),
        ({"nodes": 1024, "batch": 1024}, "batch"),
        ({"nodes": 0}, "nodes"),
        ({"shape": {"heads": 7, "kv_heads": 2}}, "kv_heads"),
        ({"shape": {"experts": EXPERTS | {"top_k": 9}}}, "experts.top_k"),
        ({"shape": {"experts": EXPERTS | {"ffn_width": 1}}}, "experts.ffn_width"),
        ({"tokens": "x"}, "tokens"),
        ({"allow": ["x"]}, "allow"),
    ],
)
def test_a_mistake_names_its_field_of_the_form(change: dict[str, Any], field: str) -> None:
    assert Planner().answer({"part": "search", **STATE, **change})["field"] == field


def test_the_whole_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Days and cost as on the command line; the layouts are searched once, whatever is trained."""
    planner = Planner()
    plain = planner.answer({"part": "search", **STATE, "full": True})
    assert plain["rows"][0]["training"] is None and plain["training"] == ""
    monkeypatch.setattr("meshwright.plan.search", lambda *_, **__: pytest.fail("searched again"))
    found = planner.answer({"part": "search", **STATE, "tokens": "1.5T", "price": "2.5"})
    assert found["whole"] and [row["pick"] for row in found["rows"]] == [row["pick"] for row in plain["rows"]]
    row = found["rows"][0]
    days = 1.5e12 / (row["tokens_per_s_per_gpu"] * 16) / 86400
    assert row["training"]["days"] == pytest.approx(days) and not row["training"]["late"]
    assert row["training"]["cost"] == pytest.approx(days * 24 * 16 * 2.5)
    assert f"1.5T tokens: {days:,.1f} days, {days * 384:,.0f} GPU-hours, cost {days * 960:,.0f}" in found["training"]
    late = planner.answer({"part": "search", **STATE, "tokens": "1.5T", "days": str(days / 2)})
    assert late["rows"][0]["training"]["late"] and "2 times" in late["training"]
    reached = planner.answer({"part": "search", **STATE, "days": "10"})["rows"][0]["training"]
    assert reached["tokens"] == pytest.approx(row["tokens_per_s_per_gpu"] * 16 * 864000)
    assert reached["days"] == pytest.approx(10) and reached["cost"] is None


def test_what_would_fit_is_said_as_on_the_command_line(cli: Callable[..., Any]) -> None:
    state = {"model": "llama-2-7b", "nodes": 1, "gpus": 1, "gpu": "a100-80gb", "seq": 512, "batch": 512}
    quick = Planner().answer({"part": "search", **state})["nothing"]
    assert "use more or larger ones" in quick  # the hint takes longer than a first answer may
    answer = Planner().answer({"part": "search", **state, "full": True})
    done = cli("plan", "--model", "llama-2-7b", "--cluster", "1xa100-80gb", "--seq", "512", "--batch-tokens", "512")
    assert done.code == 2 and "give --allow offload, which keeps optimizer states in the host's memory" in done.err
    assert "try offload under Allowed, which keeps optimizer states in the host's memory." in answer["nothing"]
    larger = {**state, "model": "llama-2-13b", "gpu": "rtx-3090", "full": True}
    small = Planner().answer({"part": "search", **larger})["nothing"]
    assert re.search(r"try (\d+ nodes with \d+ GPUs each|\d+ GPUs in a node), \d+ times the GPUs\.", small), small


@pytest.mark.thorough
def test_every_gpu_on_offer_can_be_planned_and_guessed_rates_say_so() -> None:
    """Otherwise the list would offer cards that are then refused."""
    gpus = choices(Path("runs"))["gpus"]
    planner, guessed = Planner(), {}
    for gpu in gpus:
        state = {"model": "tiny-llama", "nodes": 1, "gpus": 1, "gpu": gpu, "seq": 64, "batch": 512}
        found = planner.answer({"part": "search", **state})
        assert found.get("rows"), (gpu, found)
        one = planner.answer({"part": "layout", **state, "pick": found["rows"][0]["pick"]})
        guessed[gpu] = any(": guessed from" in each for each in one["guessed"])
    assert {gpu: fields["guessed"] for gpu, fields in gpus.items()} == guessed
    assert {gpu for gpu, is_guessed in guessed.items() if is_guessed} == {"mi250x", "mi300x", "mi325x"}


def test_the_mesh_shows_every_stage_and_its_layers() -> None:
    """Also on more nodes than are drawn, of which the first all hold the first stage."""
    drawn = mesh({"pp": 4, "dp_shard": 128, "tp": 8}, 8, ["embedding, layers 0–7", "layers 8–15", "x", "y"])
    panel = drawn[: drawn.index("pipeline stages (pp): 4</p>")]
    assert set(re.findall(r": pp (\d+)</title>", panel)) == {"0", "1", "2", "3"}
    assert "16 of 512 nodes" in drawn and "0: <span>embedding, layers 0–7</span>" in drawn
    shards = drawn[drawn.index("pipeline stages (pp): 4</p>") :]
    assert len(set(re.findall(r": dp_shard (\d+)</title>", shards))) == 16  # as many as there are rows
    job = Planner().answer({"part": "search", **STATE, "full": True})
    piped = next(row for row in job["rows"] if " pp " in row["layout"])
    one = Planner().answer({"part": "layout", **STATE, "pick": piped["pick"]})["pictures"]
    held = re.findall(r"layers? (\d+)(?:–(\d+))?", one[one.index('class="stages"') : one.index("</ul>")])
    assert sorted(layer for a, b in held for layer in range(int(a), int(b or a) + 1)) == list(range(32))


def test_the_mesh_shows_which_ranks_have_the_same_experts() -> None:
    drawn = mesh({"dp_shard": 2, "pp": 2, "tp": 2}, 8, ep=4)  # data parallelism outside the pipeline
    panel = drawn[drawn.index("shards of a layer (tp): 2</p>") :]
    assert "ranks with different experts (ep): 4</p>" in panel
    assert re.findall(r"rank \d+: ep (\d+)</title>", panel) == list("01012323")
    assert "(ep)" not in mesh({"dp_shard": 4}, 8)


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_an_uploaded_config_keeps_its_experts_and_its_attention(preset: str) -> None:
    model = Model(**model_preset(preset))
    shape = Planner().answer({"part": "config", "config": model_to_hf_config(model)})["shape"]
    named, uploaded = asked({"model": preset}).model, asked({"shape": json.loads(json.dumps(shape))}).model
    assert {name: getattr(uploaded, name) for name in SHAPE} == {name: getattr(named, name) for name in SHAPE}
    assert parameter_count(uploaded) == parameter_count(named)


def test_every_number_of_a_shape_has_a_name_and_a_meaning() -> None:
    fields = choices(Path())["shape"]
    assert {"layers", "experts.count", "experts.top_k", "experts.ffn_width", "experts.shared_width"} <= set(fields)
    assert fields["experts.top_k"] == {"label": "experts per token", "meaning": "Experts that each token is sent to."}


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
    wrong = cli("report", str(job), "--cluster", "8xh100", "--force")
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
