"""The documentation as a static site: every page of the checkout as HTML, with the files it links to.

python scripts/build_site.py [FOLDER]      into build/site by default; exits with 1 if a link is broken
"""

import shutil
import sys
from collections.abc import Callable
from html import escape
from html.parser import HTMLParser
from os.path import relpath
from pathlib import Path
from urllib.parse import unquote, urlsplit

from meshwright.studio.learn import titles_in_order
from meshwright.studio.markdown import to_html
from meshwright.studio.page import asset

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"": "Start", "docs": "Guide", "benchmarks": "Measurements"}
"""Titles of folders; others use their own name."""


def build(root: Path, out: Path) -> None:
    """Write the site of a checkout; `out` is replaced."""
    root, out = root.resolve(), out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "style.css").write_text(asset("base.css") + asset("studio.css"), encoding="utf-8")
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "benchmarks").rglob("*.md")]
    texts = {page.relative_to(root).with_suffix("").as_posix(): page.read_text(encoding="utf-8") for page in pages}
    in_order = titles_in_order(texts)
    titles = dict(sorted(in_order.items(), key=lambda page: page[0].startswith("benchmarks")))  # measurements come last
    for name, text in texts.items():
        address = _addresses(root, out, name, set(texts))
        _write(out, name, titles, to_html(text, address, address))


def _file(name: str) -> str:
    """A page's path in the site: a folder's README becomes its index."""
    folder, _, last = name.rpartition("/")
    return f"{folder}/{last}".lstrip("/") + ".html" if last != "README" else f"{folder}/index.html".lstrip("/")


def _addresses(root: Path, out: Path, name: str, names: set[str]) -> Callable[[str], str]:
    """What a page's links become: pages their HTML, other files a copy; missing targets stay and are reported as
    broken."""
    here = (root / name).parent

    def address(target: str) -> str:
        path, mark, heading = target.partition("#")
        if not path or urlsplit(target).scheme:
            return target
        found = (here / unquote(path)).resolve()
        if not found.is_file() or root not in found.parents:
            return target
        inside = found.relative_to(root).as_posix()
        if inside.removesuffix(".md") in names:
            inside = _file(inside.removesuffix(".md"))
        else:
            (out / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found, out / inside)
        return relpath(out / inside, (out / _file(name)).parent) + mark + heading

    return address


def _write(out: Path, name: str, titles: dict[str, str], body: str) -> None:
    file = out / _file(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    links, folder = [], None
    for each, title in titles.items():
        if folder != (folder := each.rpartition("/")[0]):
            links.append(f"<b>{escape(FOLDERS.get(folder, folder.rpartition('/')[2]))}</b>")
        current = ' aria-current="page"' if each == name else ""
        links.append(f'<a href="{escape(relpath(out / _file(each), file.parent))}"{current}>{escape(title)}</a>')
    home, style = (escape(relpath(out / one, file.parent)) for one in ("index.html", "style.css"))
    file.write_text(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<title>{escape(titles[name])} · Meshwright</title>\n<link rel="stylesheet" href="{style}">\n</head>\n<body>\n'
        f'<header class="bar"><a class="brand" href="{home}">Meshwright</a></header>\n<main><div class="columns">\n'
        f'<nav class="side" id="guide" aria-label="Pages">{"".join(links)}</nav>\n'
        f'<article class="wide" id="page">\n{body}\n</article>\n</div></main>\n</body>\n</html>\n',
        encoding="utf-8",
    )


class _Links(HTMLParser):
    """The ids and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, _tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for key, value in attributes:
            if key == "id" and value:
                self.ids.add(value)
            elif key in ("href", "src"):
                self.targets.append(value or "")


def broken(out: Path) -> list[str]:
    """Every broken link and picture of a site; of external addresses only the form is checked."""
    out = out.resolve()
    pages = {page: _Links(page.read_text(encoding="utf-8")) for page in sorted(out.rglob("*.html"))}
    return [
        f"{page.relative_to(out)}: {target} {wrong}"
        for page, links in pages.items()
        for target in links.targets
        if (wrong := _wrong(page, target, out, pages))
    ]


def _wrong(page: Path, target: str, out: Path, pages: dict[Path, _Links]) -> str | None:
    split = urlsplit(target)
    if split.scheme or split.netloc:
        return None if split.scheme in ("http", "https") and "." in split.netloc else "is not an address"
    file = (page.parent / unquote(split.path)).resolve() if split.path else page
    if not file.is_file() or out not in file.parents:
        return "does not exist"
    if split.fragment and (file not in pages or split.fragment not in pages[file].ids):
        return "has no such heading"
    return None


if __name__ == "__main__":
    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site")
    build(ROOT, site)
    wrong = broken(site)
    print(*wrong, f"{len(list(site.rglob('*.html')))} pages: {site / 'index.html'}", sep="\n")
    sys.exit(1 if wrong else 0)
