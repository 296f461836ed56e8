"""The site of the guide: every link of every page leads somewhere, and one that does not is named."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from docs_pages import GUIDE, ROOT


@pytest.fixture(scope="module")
def site() -> Iterator[ModuleType]:
    """The script that builds it."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import build_site

        yield build_site
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.mark.thorough
def test_every_page_is_there_and_every_link_leads_somewhere(site: ModuleType, tmp_path: Path) -> None:
    site.build(ROOT, tmp_path)
    assert site.broken(tmp_path) == []
    for page in GUIDE:
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        html = (tmp_path / page.parent.relative_to(ROOT) / name).read_text(encoding="utf-8")
        assert 'aria-current="page"' in html and 'href="http' not in html.partition("<body>")[0]
    assert (tmp_path / "docs/playbook/images/1f1b.svg").is_file()


def test_what_leads_nowhere_is_named(site: ModuleType, tmp_path: Path) -> None:
    root, out = tmp_path / "checkout", tmp_path / "site"
    (root / "docs" / "deep").mkdir(parents=True)
    (root / "README.md").write_text("# One\n\n[two](docs/two.md#a-b) [lost](docs/three.md) ![p](docs/p.svg)\n")
    (root / "docs" / "two.md").write_text("# Two\n\n## A `b`\n\n[up](../README.md#one) [not](#c) [`x`](../data.toml)\n")
    (root / "docs" / "deep" / "README.md").write_text(
        "# Deep\n\n[out](../../../secret) [odd](https:x) [bad](javascript:x) [ok](https://a.b/c)\n"
    )
    (root / "data.toml").write_text("a = 1\n")
    (tmp_path / "secret").write_text("x")
    site.build(root, out)
    assert (out / "data.toml").is_file() and "javascript" not in (out / "docs/deep/index.html").read_text()
    assert site.broken(out) == [
        "docs/deep/index.html: ../../../secret does not exist",
        "docs/deep/index.html: https:x is not an address",
        "docs/two.html: #c has no such heading",
        "index.html: docs/three.md does not exist",
        "index.html: docs/p.svg does not exist",
    ]
