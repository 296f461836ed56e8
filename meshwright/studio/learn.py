"""The guide inside the page: the Markdown files and drawings that ship with the package."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from posixpath import dirname, join, normpath
from urllib.parse import quote

from meshwright.studio.inside import Outside
from meshwright.studio.markdown import to_html


@cache
def guide_titles() -> dict[str, str]:
    """Every page of the guide: name → title. A folder's pages stand together, in the order its README links them."""
    titles = {}
    for name in _files(".md"):
        titles[name.removesuffix(".md")] = _text(name).partition("\n")[0].removeprefix("# ").strip()

    def place(name: str) -> tuple[str, int, str]:
        folder = dirname(name)
        order = _order(folder) if folder else []
        return folder, order.index(name) if name in order else len(order), titles[name].lower()

    return {name: titles[name] for name in sorted(titles, key=place)}


@cache
def guide_page(name: str) -> str:
    """One page as HTML."""
    if name not in guide_titles():
        raise Outside(name)
    folder = dirname(name)

    def address(target: str) -> str | None:
        """Links between pages of the guide lead inside; others would leave this machine or point at files not here."""
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


def _order(folder: str) -> list[str]:
    index = f"{folder}/README.md"
    linked = re.findall(r"\]\(([\w-]+)\.md\)", _text(index)) if index in _files(".md") else []
    return [join(folder, name) for name in ("README", *linked)]


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
