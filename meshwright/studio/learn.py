"""The guide inside the page: the Markdown files that ship with the package."""

import re
from functools import cache
from importlib.resources import files

from meshwright.studio.inside import Outside
from meshwright.studio.markdown import to_html


@cache
def guide_titles() -> dict[str, str]:
    """Every page of the guide: name → title."""
    titles = {}
    for entry in files("meshwright.studio").joinpath("guide").iterdir():
        if entry.name.endswith(".md"):
            first = entry.read_text(encoding="utf-8").partition("\n")[0]
            titles[entry.name.removesuffix(".md")] = first.removeprefix("# ").strip()
    return dict(sorted(titles.items(), key=lambda pair: pair[1].lower()))


@cache
def guide_page(name: str) -> str:
    """One page as HTML."""
    if name not in guide_titles():
        raise Outside(name)
    text = files("meshwright.studio").joinpath("guide", f"{name}.md").read_text(encoding="utf-8")
    return to_html(text, _address)


def _address(target: str) -> str | None:
    """Links between pages of the guide lead inside; others would leave this machine or point at files not here."""
    found = re.fullmatch(r"([\w-]+)\.md(#.*)?", target)
    return f"#learn?page={found[1]}" if found and found[1] in guide_titles() else None
