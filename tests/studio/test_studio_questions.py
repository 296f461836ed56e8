"""The planning page's other questions: the same answers as the command line's, in the words of the page."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from meshwright.studio.planner import Planner
from meshwright.studio.questions import ASKS
from meshwright.studio.scatter import Cloud, scatter

STATE = {"part": "question", "model": "llama-3.2-1b", "nodes": 1, "gpus": 2, "gpu": "rtx-4090", "batch": "262144"}
COMMAND = ("plan", "--model", "llama-3.2-1b", "--batch-tokens", "262144", "--json")


def answer(ask: str, **more: Any) -> dict[str, Any]:
    found = Planner().answer({**STATE, "ask": ask, **more})
    assert "error" not in found, found
    assert all(len(row["cells"]) == len(found["columns"]) for row in found["rows"])
    assert not re.search(r"--[a-z]|\bcluster\.[a-z]", json.dumps([found["sentence"], found["notes"]]))
    return found


def cells(found: dict[str, Any], name: str) -> list[str]:
    place = [column["name"] for column in found["columns"]].index(name)
    return [row["cells"][place] for row in found["rows"]]


def test_clusters_side_by_side(cli: Callable[..., Any]) -> None:
    found = answer("compare", clusters="8xh100@4, 1xrtx-3090 8xa100-80gb@1", tokens="1e11", pue=1.2, co2=100)
    assert cells(found, "cluster") == ["8xh100", "1xrtx-3090", "8xa100-80gb"]
    assert found["sentence"] == "8xh100 is the fastest, 8xa100-80gb the cheapest per token."
    shown = json.loads(cli(*COMMAND, "--compare", "8xh100@4", "8xa100-80gb@1", "--tokens", "1e11").out)["clusters"]
    assert cells(found, "days")[::2] == [f"{one['training']['days']:,.1f}" for one in shown]
    assert cells(found, "cost per 10⁹")[::2] == [f"{one['cost_per_billion_tokens']:,.2f}" for one in shown]
    assert any("of the site" in note and "t of CO₂" in note for note in found["notes"])
    again = Planner().answer({**STATE, "part": "search", **found["rows"][0]["opens"], "full": True})
    assert again["rows"][0]["pick"] == found["rows"][0]["opens"]["pick"]


@pytest.mark.thorough
def test_how_many_nodes(cli: Callable[..., Any]) -> None:
    state = {"gpu": "h100", "gpus": 2, "tokens": "1e11", "days": "4", "price": "2"}
    found = answer("size", **state)
    words = (*COMMAND, "--cluster", "2xh100", "--tokens", "1e11", "--days", "4", "--price", "2")
    expected = json.loads(cli(*words).out)["answer"]
    chosen = [row["cells"][0] for row in found["rows"] if row["chosen"]]
    assert chosen == [expected["cluster"]] and found["sentence"].startswith(expected["cluster"])
    too_little = {**state, "days": None, "budget": "10"}
    assert "No number of these nodes is enough" in answer("size", **too_little)["sentence"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["model", "sequence", "batch"])
def test_the_largest_opens_as_a_plan(kind: str, cli: Callable[..., Any]) -> None:
    found = answer(kind)
    (one,) = json.loads(cli(*COMMAND, "--cluster", "2xrtx-4090", "--largest", kind).out)["clusters"]
    size = {"model": one["model"]["width"], "sequence": f"{one['size']:,}", "batch": f"{one['size']:,}"}[kind]
    assert str(size) in found["sentence"] and any("is too large: " in note for note in found["notes"])
    opens = found["rows"][0]["opens"]
    job = Planner().answer({"part": "layout", **opens})
    assert "error" not in job and "svg" in job["pictures"]
    if kind == "model":
        assert opens["shape"]["layers"] == one["model"]["layers"]


def test_which_part_to_improve_and_what_to_trade() -> None:
    parts = answer("sensitivity")
    assert cells(parts, "part")[0] in parts["sentence"].lower() and cells(parts, "tokens/s")[0].startswith("+")
    traded = answer("pareto", clusters="2xrtx-4090@1 1xh100@2")
    assert traded["picture"].startswith('<figure class="picture scatter">') and traded["picture"].count("<circle") > 3
    assert set(cells(traded, "cluster")) <= {"2xrtx-4090", "1xh100"}
    assert "style=" not in traded["picture"]


@pytest.mark.parametrize(
    ("state", "field", "words"),
    [
        ({"ask": "rm"}, "ask", "Question = rm is not one of the page's"),
        ({"ask": "compare"}, "clusters", "Clusters is empty"),
        ({"ask": "compare", "clusters": "8xh1000"}, "clusters", "is not in the hardware table"),
        ({"ask": "compare", "clusters": "<b>"}, "clusters", "Clusters = <b> is not understood"),
        ({"ask": "compare", "clusters": "8xh100@cheap"}, "clusters", "whose price 'cheap' is not a number"),
        ({"ask": "compare", "clusters": "9999x8xh100"}, "clusters", "which is too large"),
        ({"ask": "compare", "clusters": "1x16384xh100"}, "clusters", "16,384 GPUs per node, and at most 10,000"),
        ({"ask": "compare", "clusters": "1000000x8xh100"}, "clusters", "Clusters = 1000000x8xh100 has 8,000,000 GPUs"),
        ({"ask": "compare", "clusters": "8xh100 " * 9}, "clusters", "give at most 8"),
        ({"ask": "size", "days": "3"}, "tokens", "Tokens is empty"),
        ({"ask": "size", "tokens": "1T"}, "days", "Days and Budget are empty"),
        ({"ask": "size", "tokens": "1T", "budget": "1e6"}, "price", "Price is empty"),
        ({"ask": "model", "budget": "many"}, "budget", "Budget = many is not an amount"),
        ({"ask": "sensitivity", "pue": 0.5}, "pue", "PUE = 0.5 is not a number from 1 to 10"),
        ({"ask": "sensitivity", "model": "llama-3-70b"}, None, "No layout fits on 2xrtx-4090"),
        ({"ask": "sequence", "model": "llama-3-70b"}, None, "Nothing fits on 2xrtx-4090, however small"),
    ],
)
def test_mistakes_name_their_field(state: dict[str, Any], field: str | None, words: str) -> None:
    found = Planner().answer({**STATE, **state})
    assert words in found["error"] and found["field"] == field and "\n" not in found["error"]
    assert not re.search(r"--[a-z]|\bcluster\.[a-z]", found["error"])


def test_another_request_is_answered_first_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(interrupted=lambda: True)
    asked = {**STATE, "ask": "sensitivity"}
    assert [planner.answer(asked).get("interrupted") for _ in range(3)] == [True, True, None]
    assert planner.answer(asked)["rows"]
    monkeypatch.setattr("meshwright.studio.planner.LONG_S", 0.0)
    assert "takes too long" in Planner().answer(asked)["error"]


def test_names_in_a_picture_are_escaped() -> None:
    drawn = scatter("<i>", "<b>", "s", [Cloud("<script>", [(1.0, 2.0, True, "<u>"), (2.0, 1.0, False, "x")])])
    assert "<script" not in drawn and "<u>" not in drawn and "<i>" not in drawn.replace('<i class="swatch', "")
    assert 'class="kept tint-0"' in drawn and 'class="beaten tint-0"' in drawn


def test_the_page_offers_every_question(cli: Callable[..., Any]) -> None:
    from meshwright.studio.planner import other_answer

    for name in ASKS:
        if name != "layouts":
            with pytest.raises(KeyError, match="stopped"):
                other_answer({**STATE, "ask": name, "clusters": "1xh100", "tokens": 1, "days": 1}, [], _stopped)


def _stopped() -> None:
    raise KeyError("stopped")
