"""Markdown as the guide writes it, to HTML: headings, paragraphs, lists, tables, code, links, emphasis; all escaped."""

import re
from collections.abc import Callable
from html import escape

_HEADING = re.compile(r"(#{1,4}) (.*)")
_ITEM = re.compile(r"(\s*)(?:[-*]|\d+\.) (.*)")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_IMAGE = re.compile(r"!\[([^\]]*)\]\([^)\s]+\)")


def to_html(text: str, link: Callable[[str], str | None]) -> str:
    """A page's HTML; `link` turns a target into an address, or None where the page must not lead there."""
    lines = text.splitlines()
    parts, at = [], 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("```"):
            end = next((n for n in range(at + 1, len(lines)) if lines[n].startswith("```")), len(lines))
            code = escape("\n".join(lines[at + 1 : end]))
            parts.append(f'<pre tabindex="0"><code>{code}</code></pre>')
            at = end + 1
        elif heading := _HEADING.fullmatch(line):
            level = len(heading[1]) + 1  # the page's own name is its first heading
            parts.append(f'<h{level} id="{_anchor(heading[2])}">{_inline(heading[2], link)}</h{level}>')
            at += 1
        elif line.startswith("|"):
            end = _while(lines, at, lambda each: each.startswith("|"))
            parts.append(_table(lines[at:end], link))
            at = end
        elif _ITEM.fullmatch(line):
            end = _while(lines, at, lambda each: bool(_ITEM.fullmatch(each) or each.startswith("  ")))
            parts.append(_list(lines[at:end], link))
            at = end
        elif line.strip():
            end = _while(lines, at, lambda each: bool(each.strip()) and not each.startswith(("```", "#", "|")))
            parts.append(f"<p>{_inline(' '.join(lines[at:end]), link)}</p>")
            at = end
        else:
            at += 1
    return "\n".join(parts)


def _while(lines: list[str], at: int, holds: Callable[[str], bool]) -> int:
    end = at + 1
    while end < len(lines) and holds(lines[end]):
        end += 1
    return end


def _table(lines: list[str], link: Callable[[str], str | None]) -> str:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    head, body = rows[0], [row for row in rows[1:] if not all(set(cell) <= set("-: ") for cell in row)]
    top = "".join(f'<th scope="col">{_inline(cell, link)}</th>' for cell in head)
    rest = "".join("<tr>" + "".join(f"<td>{_inline(cell, link)}</td>" for cell in row) + "</tr>" for row in body)
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{rest}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="group" aria-label="table">{table}</div>'


def _list(lines: list[str], link: Callable[[str], str | None]) -> str:
    items: list[str] = []
    for line in lines:
        item = _ITEM.fullmatch(line)
        if item:
            items.append(item[2])
        else:
            items[-1] += " " + line.strip()
    return "<ul>" + "".join(f"<li>{_inline(item, link)}</li>" for item in items) + "</ul>"


def _inline(text: str, link: Callable[[str], str | None]) -> str:
    """Code spans first, since nothing inside them is markup."""
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"<code>{escape(piece[1:-1])}</code>" if piece.startswith("`") and len(piece) > 2 else _marked(piece, link)
        for piece in pieces
    )


def _marked(text: str, link: Callable[[str], str | None]) -> str:
    text = escape(_IMAGE.sub(r"\1", text))

    def linked(found: re.Match[str]) -> str:
        address = link(found[2])
        return found[1] if address is None else f'<a href="{escape(address)}">{found[1]}</a>'

    text = _LINK.sub(linked, text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text)
    return re.sub(r"(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])", r"<em>\1</em>", text)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))
