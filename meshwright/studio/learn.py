"""The guide inside the page: the Markdown files and drawings that ship with the package."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from posixpath import dirname, join, normpath
from typing import Any
from urllib.parse import quote

from meshwright.studio.confined import Outside
from meshwright.studio.markdown import to_html

START = "README"
"""The page where a reader begins."""


def titles_in_order(texts: Mapping[str, str]) -> dict[str, str]:
    """Name → title for pages by name, grouped by folder, in the order of its README's links, else by title."""
    titles = {name: text.partition("\n")[0].removeprefix("# ").strip() for name, text in texts.items()}
    orders = {folder: _order(folder, texts) for folder in {dirname(name) for name in texts}}

    def place(name: str) -> tuple[str, int, str]:
        order = orders[dirname(name)]
        return dirname(name), order.index(name) if name in order else len(order), titles[name].lower()

    return {name: titles[name] for name in sorted(titles, key=place)}


def _order(folder: str, texts: Mapping[str, str]) -> list[str]:
    index = join(folder, "README")
    linked = re.findall(r"\]\(([\w-]+)\.md\)", texts.get(index, ""))
    return [index, *(join(folder, name) for name in linked)]


@cache
def guide_titles() -> dict[str, str]:
    """Every page of the guide: name → title, in order."""
    return titles_in_order(_texts())


@cache
def guide_groups() -> list[dict[str, Any]]:
    """The pages as a reader meets them: the start page, the groups under its headings, a group for every folder.

    Pages that the start page does not name come last.
    """
    titles, start = guide_titles(), _texts()[START]
    groups: dict[str, list[str]] = {}
    for part in re.split(r"^## ", start, flags=re.MULTILINE)[1:]:
        named = [name for name in re.findall(r"\]\(([\w-]+)\.md\)", part) if name in titles]
        groups[part.partition("\n")[0].strip()] = named
    for folder in sorted({dirname(name) for name in titles} - {""}):
        groups[titles.get(f"{folder}/README", folder)] = [name for name in titles if dirname(name) == folder]
    placed = {START}.union(*groups.values())
    groups["More"] = [name for name in titles if name not in placed]
    return [
        {"title": title, "pages": [{"name": name, "title": titles[name]} for name in dict.fromkeys(names)]}
        for title, names in groups.items()
        if names
    ]


@cache
def guide_page(name: str) -> str:
    """One page as HTML."""
    if name not in guide_titles():
        raise Outside(name)
    folder = dirname(name)

    def address(target: str) -> str | None:
        """Links between pages of the guide stay inside; others would leave this machine or point to missing files."""
        path, _, heading = target.partition("#")
        found = _inside(folder, path).removesuffix(".md") if path else name
        if (path and not path.endswith(".md")) or found not in guide_titles():
            return None
        return f"#learn?page={quote(found)}" + (f"&at={quote(heading)}" if heading else "")

    def picture(target: str) -> str | None:
        found = _inside(folder, target)
        return f"guide/{quote(found)}" if found in _files(".svg") else None

    return to_html(_text(f"{name}.md"), address, picture)


def guide_picture(name: str) -> bytes:
    """A drawing that pages of the guide show."""
    if name not in _files(".svg"):
        raise Outside(name)
    return _text(name).encode()


@cache
def _texts() -> dict[str, str]:
    return {name.removesuffix(".md"): _text(name) for name in _files(".md")}


def _inside(folder: str, target: str) -> str:
    return normpath(join(folder, target))


@cache
def _files(ending: str) -> list[str]:
    return [name for name in _walk(files("meshwright.studio").joinpath("guide"), "") if name.endswith(ending)]


def _walk(folder: Traversable, above: str) -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{above}{entry.name}/")
        else:
            yield f"{above}{entry.name}"


def _text(name: str) -> str:
    return files("meshwright.studio").joinpath("guide", *name.split("/")).read_text(encoding="utf-8")
