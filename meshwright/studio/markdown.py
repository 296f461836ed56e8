"""Markdown as the guide writes it, to HTML: headings, paragraphs, lists, tables, code, links, pictures; all escaped."""

import re
from collections.abc import Callable
from html import escape

_HEADING = re.compile(r"(#{1,4}) (.*)")
_ITEM = re.compile(r"( *)([-*]|\d+\.) (.*)")
_STARTS = ("```", "#", "|", "- ")
_CELL_END = re.compile(r"(?<!\\)\|")
# Code first, since nothing inside it is markup; a link's words may hold code.
_INLINE = re.compile(
    r"`(?P<code>[^`]+)`"
    r"|!\[(?P<alt>[^\]]*)\]\((?P<picture>[^)\s]+)\)"
    r"|\[(?P<words>(?:`[^`]*`|[^\]`])+)\]\((?P<target>[^)\s]+)\)"
)

Address = Callable[[str], str | None]
"""Turns a link's or picture's target into an address, or None where the page must not lead there."""


def to_html(text: str, link: Address, picture: Address | None = None) -> str:
    """A page's HTML; a picture without an address is its words."""
    return _Page(link, picture or (lambda _: None)).blocks(text.splitlines())


class _Page:
    def __init__(self, link: Address, picture: Address) -> None:
        self.link, self.picture = link, picture

    def blocks(self, lines: list[str]) -> str:
        parts, at = [], 0
        while at < len(lines):
            line = lines[at]
            if line.startswith("```"):
                end = next((n for n in range(at + 1, len(lines)) if lines[n].startswith("```")), len(lines))
                parts.append(_code(lines[at + 1 : end]))
                end += 1
            elif line.startswith("    ") and line.strip():
                end = _while(lines, at, lambda each: each.startswith("    "))
                parts.append(_code([each[4:] for each in lines[at:end]]))
            elif heading := _HEADING.fullmatch(line):
                level, end = len(heading[1]) + 1, at + 1  # the page's own name is its first heading
                parts.append(f'<h{level} id="{_anchor(heading[2])}">{self.inline(heading[2])}</h{level}>')
            elif line.startswith("|"):
                end = _while(lines, at, lambda each: each.startswith("|"))
                parts.append(self.table(lines[at:end]))
            elif _ITEM.fullmatch(line):
                end = _while(lines, at, lambda each: bool(_ITEM.fullmatch(each) or each.startswith("  ")))
                parts.append(self.items(lines[at:end]))
            elif line.strip():
                end = _while(lines, at, lambda each: bool(each.strip()) and not each.startswith(_STARTS))
                parts.append(f"<p>{self.inline(' '.join(lines[at:end]))}</p>")
            else:
                end = at + 1
            at = end
        return "\n".join(parts)

    def table(self, lines: list[str]) -> str:
        cells = [_CELL_END.split(line.strip()[1:].removesuffix("|")) for line in lines]
        rows = [[cell.strip().replace("\\|", "|") for cell in row] for row in cells]
        head, body = rows[0], [row for row in rows[1:] if not all(set(cell) <= set("-: ") for cell in row)]
        top = "".join(f'<th scope="col">{self.inline(cell)}</th>' for cell in head)
        rest = "".join("<tr>" + "".join(f"<td>{self.inline(cell)}</td>" for cell in row) + "</tr>" for row in body)
        table = f"<table><thead><tr>{top}</tr></thead><tbody>{rest}</tbody></table>"
        return f'<div class="scroll" tabindex="0" role="group" aria-label="table">{table}</div>'

    def items(self, lines: list[str]) -> str:
        kind = "ol" if lines[0].lstrip()[0].isdigit() else "ul"
        items: list[str] = []
        for line in lines:
            item = _ITEM.fullmatch(line)
            if item:
                items.append(item[3])
            else:
                items[-1] += " " + line.strip()
        return f"<{kind}>" + "".join(f"<li>{self.inline(item)}</li>" for item in items) + f"</{kind}>"

    def inline(self, text: str) -> str:
        """Code, links and pictures are set aside first: emphasis may go around them, never inside."""
        aside: list[str] = []

        def put_aside(found: re.Match[str]) -> str:
            aside.append(self.span(found))
            return f"\0{len(aside) - 1}\0"

        text = escape(_INLINE.sub(put_aside, text.replace("\0", "")))
        text = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text)
        text = re.sub(r"(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])", r"<em>\1</em>", text)
        return re.sub("\0(\\d+)\0", lambda found: aside[int(found[1])], text)

    def span(self, found: re.Match[str]) -> str:
        if found["code"] is not None:
            return f"<code>{escape(found['code'])}</code>"
        if found["picture"] is not None:
            address = self.picture(found["picture"])
            alt = escape(found["alt"])
            return alt if address is None else f'<img src="{escape(address)}" alt="{alt}">'
        words, address = self.inline(found["words"]), self.link(found["target"])
        return words if address is None else f'<a href="{escape(address)}">{words}</a>'


def _code(lines: list[str]) -> str:
    return f'<pre tabindex="0"><code>{escape(chr(10).join(lines))}</code></pre>'


def _while(lines: list[str], at: int, holds: Callable[[str], bool]) -> int:
    end = at + 1
    while end < len(lines) and holds(lines[end]):
        end += 1
    return end


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))
