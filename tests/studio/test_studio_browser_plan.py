"""The plan page in a real Chromium: what it shows after an error, the whole training, hints, colours and stages."""

import re
from typing import Any

import pytest
from studio_runs import planned

pytestmark = [pytest.mark.browser, pytest.mark.thorough]
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


def test_experts_are_numbers_of_the_shape(tab: Any) -> None:
    """A dense model becomes a mixture, says its active parameters, and becomes dense again."""
    page = tab(SMALL.replace("gpt2", "llama-3.2-1b"))
    planned(page)
    page.click("summary:has-text('Shape')")
    count, top_k = (f"input[type=number][data-shape='experts.{name}']" for name in ("count", "top_k"))
    assert page.input_value(count) == "" and page.inner_text("#size") == "1.24B parameters"
    page.fill(count, "4")
    page.wait_for_selector("#size:has-text('active')")
    assert page.input_value(top_k) == "2"
    page.fill(top_k, "5")
    page.wait_for_selector("#plan-status.error:has-text('experts per token = 5 is more than experts = 4')")
    assert page.get_attribute(top_k, "aria-invalid") == "true"
    page.fill(count, "0")
    page.wait_for_function("() => document.getElementById('size').textContent === '1.24B parameters'")


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


def test_the_whole_training_in_days_and_money(tab: Any) -> None:
    page = tab(SMALL)
    planned(page)
    assert not page.is_visible("#layouts-training") and page.inner_text("#training") == ""
    page.fill("[name=tokens]", "10B")
    page.wait_for_selector("#training:has-text('10B tokens:')")
    assert page.inner_text("#layouts-training") == "days" and not page.is_visible("#layouts-cost")
    page.fill("[name=price]", "2")
    page.wait_for_selector("#training:has-text('cost')")
    row = page.eval_on_selector(
        "#layouts tbody tr", "row => Object.fromEntries([...row.cells].map(c => [c.dataset.name, c.textContent]))"
    )
    days, cost = (float(row[name].replace(",", "")) for name in ("days", "cost"))
    assert cost == pytest.approx(days * 24 * 2 * 2, rel=0.01)
    page.fill("[name=days]", "0.1")
    page.wait_for_selector("#layouts td.late-days")
    page.fill("[name=tokens]", "")
    page.wait_for_function("() => document.getElementById('layouts-training').textContent === 'tokens'")
    assert re.fullmatch(r"[\d.]+[MB]", page.inner_text("#layouts td[data-name=tokens] >> nth=0"))
    shared = tab("#" + page.url.partition("#")[2])
    shared.wait_for_selector("#training:has-text('0.1 days')")
    assert shared.input_value("[name=price]") == "2"
    page.fill("[name=days]", "")
    page.wait_for_selector("#plan-status.error:has-text('Price is of a whole training')")
    assert page.get_attribute("[name=price]", "aria-invalid") == "true"


def test_errors_use_the_words_of_the_page_and_mark_the_field(tab: Any) -> None:
    page = tab(SMALL)
    planned(page)
    for name, value, words in (
        ("seq", "4096", "Sequence = 4096 is longer than the model's longest sequence = 1024"),
        ("nodes", "0", "Nodes = 0 is not a whole number"),
        ("seq", "8k", "Sequence = 8k is not a number of tokens"),
    ):
        right = page.input_value(f"[name={name}]")
        page.fill(f"[name={name}]", value)
        page.wait_for_selector(f'#plan-status.error:has-text("{words}")')
        assert page.eval_on_selector_all("[aria-invalid]", "all => all.map(e => e.name)") == [name]
        page.fill(f"[name={name}]", right)
        planned(page)
        assert page.locator("[aria-invalid]").count() == 0


def test_a_batch_is_read_as_people_write_it(tab: Any) -> None:
    page = tab(SMALL)
    planned(page)
    page.fill("[name=batch]", "0.131072M")
    page.wait_for_function("() => document.querySelector('[name=batch]').placeholder === '131072'")
    shared = tab("#" + page.url.partition("#")[2])
    planned(shared)
    assert shared.input_value("[name=batch]") == "0.131072M" and shared.input_value("[name=seq]") == "1024"


def test_what_would_fit_is_said_when_nothing_does(tab: Any) -> None:
    page = tab("#plan?model=llama-2-7b&gpu=a100-80gb&nodes=1&gpus=1&seq=512&batch=512")
    page.wait_for_selector("#plan-status:has-text('try offload under Allowed')")
    assert not page.is_visible("#chosen") and not page.is_visible("#layouts")  # no table without a row
    page.check("[name=allow][value=offload]")
    page.wait_for_selector("#layouts tbody tr")
    page.wait_for_selector("#pictures svg")
    assert "offload optimizer" in page.inner_text("#layouts")


COLOURS = "all => all.map(e => getComputedStyle(e).color)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_memory_and_time_share_no_colour(tab: Any, scheme: str) -> None:
    page = tab("#plan?model=llama-2-13b&gpu=rtx-3090&nodes=4&gpus=8&seq=1024&batch=65536", color_scheme=scheme)
    planned(page)
    memory, time = (page.eval_on_selector_all(f".picture.{kind} i.swatch", COLOURS) for kind in ("memory", "breakdown"))
    assert len(memory) > 6 and len(time) > 6 and not set(memory) & set(time)
    assert len(set(time)) == len(time)  # nor two phases
    assert "rgba(0, 0, 0, 0)" not in memory + time and "rgb(0, 0, 0)" not in memory + time


def test_stages_of_a_pipeline_are_seen(tab: Any) -> None:
    page = tab("#plan?model=llama-2-13b&gpu=rtx-3090&nodes=4&gpus=8&seq=1024&batch=65536")
    planned(page)
    stages = page.locator(".mesh .stages li").all_inner_texts()
    layout = page.inner_text("#chosen-title")
    assert f"pp {len(stages)}" in layout
    assert stages[0].startswith("0: embedding, layer") and stages[-1].endswith("head")
    squares, keys = (
        page.eval_on_selector_all(f".mesh .panel:has(.stages) {each}", COLOURS) for each in ("rect", ".swatch")
    )
    assert len(squares) == 32 and list(dict.fromkeys(squares)) == keys and len(set(keys)) == len(keys)
    assert not re.search(r"--[a-z]|\b[a-z]+\.[a-z]+_", page.inner_text("#rejected"))  # nor options and fields of a job


def test_cards_on_offer_are_planned_and_guessed_rates_are_said(tab: Any) -> None:
    """Also AMD's, whatever is allowed; that every card can be planned is shown without a browser."""
    page = tab("#plan?model=tiny-llama&gpu=a100-40gb&nodes=1&gpus=2&seq=64&batch=1024&allow=%5B%22fp8%22%5D")
    planned(page)
    offered = page.eval_on_selector_all(
        "[name=gpu] option", "all => Object.fromEntries(all.map(e => [e.value, e.textContent]))"
    )
    amd = [gpu for gpu, words in offered.items() if words.endswith("rates guessed)")]
    assert amd == [gpu for gpu in offered if gpu.startswith("mi")] and len(amd) > 2
    for gpu in amd:
        page.select_option("[name=gpu]", gpu)
        planned(page)
        assert f"guessed: kernels and links of {gpu}: guessed from" in page.inner_text("#guessed")


def test_other_questions_answer_in_the_same_place(tab: Any) -> None:
    """One selector: an answer replaces the layouts, a row opens its layout, and the URL holds the question."""
    page = tab(SMALL)
    planned(page)
    assert not page.is_visible("[name=clusters]") and not page.is_visible("#other")
    page.select_option("[name=ask]", "compare")
    page.wait_for_selector("#plan-status.error:has-text('Clusters is empty')")
    assert page.get_attribute("[name=clusters]", "aria-invalid") == "true" and not page.is_visible("#layouts")
    page.fill("[name=clusters]", "1xh100@2 2xa100-40gb@1")
    page.wait_for_selector("#other-sentence:has-text('is the fastest')")
    assert page.locator("#other-table tbody tr").count() == 2 and not page.is_visible("#found")
    shared = tab("#" + page.url.partition("#")[2])
    shared.wait_for_selector("#other-sentence:has-text('is the fastest')")
    page.select_option("[name=ask]", "pareto")
    page.wait_for_selector("#other-picture svg circle.kept")
    page.select_option("[name=ask]", "sensitivity")
    page.wait_for_selector("#other-title:has-text('Which part')")
    assert not page.is_visible("[name=clusters]") and page.inner_html("#other-picture") == ""
    page.select_option("[name=ask]", "batch")
    page.wait_for_selector("#other-sentence:has-text('at once')")
    title = page.inner_text("#other-table button.open >> nth=0")
    page.click("#other-table button.open >> nth=0")
    page.wait_for_function("title => document.getElementById('chosen-title').textContent === title", arg=title)
    assert page.is_visible("#layouts") and not page.is_visible("#other")
    assert page.input_value("[name=ask]") == "layouts" and page.input_value("[name=seq]") == "1024"
