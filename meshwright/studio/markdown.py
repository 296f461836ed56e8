"""Markdown to HTML with markdown-it: the caller resolves links, comments are removed, all other HTML becomes text."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token

Address = Callable[[str], str | None]
"""Turns a link's or picture's target into a URL, or None if the page must not link to it."""

_SAFE = {"http", "https", "mailto"}
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_SCROLL = '<div class="scroll" tabindex="0" role="group" aria-label="table">'


def to_html(text: str, link: Address, picture: Address | None = None) -> str:
    """A page's HTML; a link or picture without a safe address is its words."""
    markdown = MarkdownIt("commonmark").enable("table")
    # Targets reach the caller as written; which of them may be followed is decided in _lead.
    vars(markdown).update(normalizeLink=str, validateLink=bool)
    tokens = markdown.parse(text)
    _set_blocks(tokens)
    for inline in tokens:
        _set_links(inline.children or [], link, picture or (lambda _: None))
    for token in _everywhere(tokens):
        if token.type in ("html_block", "html_inline"):
            token.type, token.content = "text", _COMMENT.sub("", token.content)
    html: str = markdown.renderer.render(tokens, markdown.options, {})
    return html.replace("<table>", f"{_SCROLL}<table>").replace("</table>", "</table></div>")


def _set_blocks(tokens: list[Token]) -> None:
    for token, following in pairwise(tokens):
        if token.type == "heading_open":
            token.attrSet("id", re.sub(r"[^\w-]", "", following.content.lower().replace(" ", "-")))
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):  # the page's own title is the first heading
            token.tag = f"h{min(int(token.tag[1]) + 1, 6)}"
        elif token.type in ("fence", "code_block"):
            token.type, token.attrs = "code_block", {"tabindex": "0"}
        elif token.type in ("th_open", "td_open"):
            token.attrs = {"scope": "col"} if token.tag == "th" else {}


def _set_links(children: list[Token], link: Address, picture: Address) -> None:
    hidden = False
    for token in children:
        if token.type == "link_open":
            hidden = not _lead(token, "href", link)
        if token.type in ("link_open", "link_close"):
            token.hidden = hidden
        elif token.type == "image" and not _lead(token, "src", picture):
            token.type = "text"


def _everywhere(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _everywhere(token.children or [])


def _lead(token: Token, attribute: str, address: Address) -> bool:
    """Set the target of a link or picture; False if it must not have one."""
    found = address(str(token.attrGet(attribute)))
    # Browsers skip spaces and control characters inside a scheme.
    scheme = re.match(r"([^/?#]*?):", re.sub(r"[\0-\x20]", "", found or ""))
    if found is None or (scheme and scheme[1].lower() not in _SAFE):
        return False
    token.attrSet(attribute, found)
    return True
