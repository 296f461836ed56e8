"""Every Python block of the README and the guide runs, in order, as a reader would run it, and prints what is shown."""

from pathlib import Path

import pytest
from docs_pages import GUIDE, ROOT, python_blocks, run_python

PAGES = [page for page in GUIDE if python_blocks(page.read_text(encoding="utf-8"))]
OF_THE_API = {"python", "python-train", "python-runs", "python-optimizer", "python-data"}


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_s_python_runs(
    page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, warm_command: Path
) -> None:
    run_python(page, tmp_path, tmp_path_factory.getbasetemp() / "docs-cache", warm_command / "python-warm")


def test_all_pages_of_the_api_are_among_them() -> None:
    assert OF_THE_API | {"memory"} <= {page.stem for page in PAGES}


def test_from_a_plan_to_a_loss_takes_less_than_thirty_lines() -> None:
    first = python_blocks((ROOT / "docs" / "python.md").read_text(encoding="utf-8"))[0].command
    assert len(first.splitlines()) < 30
    assert all(f"meshwright.{name}(" in first for name in ("load_job", "plan", "verify", "train")) and "losses" in first


@pytest.mark.thorough
def test_a_block_that_fails_or_prints_something_else_is_seen(tmp_path: Path, warm_command: Path) -> None:
    page, python = tmp_path / "page.md", warm_command / "python-warm"
    for number, (text, expected) in enumerate(
        [
            ("```python\na = 1\n```\n\n```python\nprint(a + 1)\n```\n\n```text\n2\n```\n", None),
            ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "prints\n1\n"),
            ("```python\n1 / 0\n```\n", "page.md, block 1"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        page.write_text(text)
        if expected is None:
            run_python(page, folder, tmp_path / "cache", python)
            continue
        with pytest.raises(AssertionError) as caught:
            run_python(page, folder, tmp_path / "cache", python)
        assert expected in str(caught.value)
