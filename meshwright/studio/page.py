"""The HTML shell of a report, with style and script embedded so that the file opens offline."""

from html import escape
from importlib.resources import files

_START = """
bindFigures(document);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => d.open = true));
"""


def page(title: str, body: str) -> str:
    """A whole HTML document around a body; `title` is plain text, `body` is HTML."""
    style = asset("base.css") + asset("pictures.css")
    script = asset("hover.js").replace("export function", "function") + _START
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def asset(name: str) -> str:
    """The text of one of the static files."""
    return files("meshwright.studio").joinpath("static", name).read_text(encoding="utf-8")
