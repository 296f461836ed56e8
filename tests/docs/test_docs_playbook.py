"""The playbook: a page for every technique, whose commands print what it shows and whose figures are those measured."""

import re
from pathlib import Path

import pytest
from docs_pages import PLAYBOOK, ROOT, Figure, blocks, figures, holds, matches, measured, pictures, run_page

INDEX = ROOT / "docs" / "playbook" / "README.md"
TECHNIQUES = [page for page in PLAYBOOK if page != INDEX]
SECTIONS = ["When to use it", "What it costs", "Numbers", "Measured here"]


@pytest.mark.thorough
@pytest.mark.parametrize("page", PLAYBOOK, ids=lambda page: page.stem)
def test_the_page_prints_what_it_shows(
    page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, warm_command: Path
) -> None:
    run_page(page, tmp_path, tmp_path_factory.getbasetemp() / "docs-cache", [warm_command, warm_command / "python"])


def test_every_technique_has_a_page_in_the_order_of_the_index() -> None:
    """S1 to S12, D1 to D12, finding a configuration, operating."""
    listed = re.findall(r"\| (S\d+|D\d+|–) \| \[[^\]]+\]\(([\w-]+\.md)\)", INDEX.read_text(encoding="utf-8"))
    assert [mark for mark, _ in listed] == [
        *(f"S{n}" for n in range(1, 13)),
        *(f"D{n}" for n in range(1, 13)),
        "–",
        "–",
    ]
    assert {name for _, name in listed} == {page.name for page in TECHNIQUES}


@pytest.mark.parametrize("page", TECHNIQUES, ids=lambda page: page.stem)
def test_the_page_has_its_parts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[: len(SECTIONS)] == SECTIONS
    shown = [block.shown for block in blocks(text) if block.shown is not None]
    assert any(re.search(r"\d", one) for one in shown), "no number that a command printed"
    assert measured(text) or "Not measured" in text


@pytest.mark.parametrize(("page", "figure"), list(figures()), ids=lambda one: getattr(one, "stem", None) or one.path)
def test_quoted_figures_are_those_of_their_files(page: Path, figure: Figure) -> None:
    assert holds(figure), f"{page.name} says {figure.value} for {figure.path} of {figure.file}"


def test_the_comparison_sees_what_differs() -> None:
    assert matches("a 1\nb … s\n…\nd 4\n", "a 1\nb 2.5 s\nc 3\nd 4\n")
    assert not matches("a 1\nb 2\n", "a 1\nb 3\n")
    assert not matches("a 1\n", "a 1\nb 2\n")
    assert not matches("a … s\n", "a 1\nb 2 s\n")
    page = "# x\n\n```bash\nls\n```\n\n```text\na 1\n```\n\n```bash\ntrue\n```\nwords\n```text\nno output\n```\n"
    assert [(block.command, block.shown) for block in blocks(page)] == [("ls", "a 1\n"), ("true", None)]
    assert pictures("![a](images/b.svg) ![c](d.png)") == ["images/b.svg"]


def test_a_figure_that_is_not_its_file_s_is_seen() -> None:
    file, place = "2026-11-15-recompute-h200.json", "results / modes=full; micro_batch=8 / tokens_per_s"
    row = f"| full | 45,079 tokens/s | `{file}`: `{place}` |\n"
    [figure] = measured(row)
    assert figure == Figure("45,079 tokens/s", file, place) and holds(figure)
    assert not holds(Figure("45,080 tokens/s", file, place))
    mfu = place.replace("tokens_per_s", "mfu")
    assert holds(Figure("41.0%", file, mfu)) and not holds(Figure("41.1%", file, mfu))
