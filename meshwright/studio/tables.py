"""The tables of a report: events, the job by section, the machine, the code."""

import json
from html import escape
from pathlib import Path
from typing import Any

from meshwright.job.reading import toml_table
from meshwright.reading import Unfit, read_text
from meshwright.studio.numbers import duration, exact

_FIRST_EVENTS, _LAST_EVENTS = 50, 150
_LONGEST_DIFF = 200_000
_LONGEST_VALUE = 2000
_LONGEST_JOB = 1 << 16


def events_table(events: list[dict[str, Any]]) -> str:
    """The events with their times; the middle of a very long list is left out, with a note."""
    if not events:
        return '<p class="note">No events yet.</p>'
    left_out = max(0, len(events) - _FIRST_EVENTS - _LAST_EVENTS)
    rows = [_event_row(event) for event in events[: _FIRST_EVENTS if left_out else None]]
    if left_out:
        rows.append(f'<tr><td></td><td class="none" colspan="2">{left_out:,} events not shown</td></tr>')
        rows.extend(_event_row(event) for event in events[-_LAST_EVENTS:])
    head = '<thead><tr><th scope="col">after</th><th scope="col">event</th><th scope="col">details</th></tr></thead>'
    return f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"


def job_tables(job: dict[str, Any], raw: str) -> str:
    """The resolved job, one small table per section; values from the job file are bold."""
    given = _given(raw)
    sections = []
    for section, fields in job.items():
        if not isinstance(fields, dict):
            fields, section = {section: fields}, "job"
        rows = "".join(_row(field, value, field in given.get(section, {})) for field, value in fields.items())
        sections.append(f"<section><h3>{escape(section)}</h3><table><tbody>{rows}</tbody></table></section>")
    file = f"<details><summary>job.toml</summary><pre>{escape(raw)}</pre></details>" if raw.strip() else ""
    note = '<p class="note above">All resolved fields; values from the job file are bold.</p>' if given else ""
    return f'{note}<div class="sections">{"".join(sections)}</div>{file}'


def environment_table(environment: dict[str, Any]) -> str:
    """Versions, machine and the environment variables that affect a run."""
    plain = {key: value for key, value in environment.items() if key != "variables"}
    plain["argv"] = " ".join(str(word) for word in environment.get("argv", []))
    variables = environment.get("variables", {})
    return _table(plain) + (
        f"<details><summary>{len(variables)} environment variables</summary>{_table(variables)}</details>"
        if variables
        else ""
    )


def code_tables(code: dict[str, Any], diff: Path) -> str:
    """Which code ran: version, commits and uncommitted changes."""
    rows: dict[str, Any] = {"meshwright": code.get("meshwright")}
    for place, title in (("package", "package"), ("working_directory", "working directory")):
        repository = code.get(place)
        if repository:
            commit = repository.get("commit") or "no commit yet"
            changes = " with uncommitted changes" if repository.get("dirty") else ""
            rows[title] = f"{commit}{changes} ({repository.get('root')})"
    if len(rows) == 1:
        rows["repository"] = None
    return _table(rows) + _diff(diff)


def _diff(path: Path) -> str:
    try:
        text = read_text(path, 4 * _LONGEST_DIFF)
    except (FileNotFoundError, Unfit):
        return ""
    cut = text[:_LONGEST_DIFF] + ("\n… the rest is in code.diff" if len(text) > _LONGEST_DIFF else "")
    return f"<details><summary>uncommitted changes</summary><pre>{escape(cut)}</pre></details>"


def _event_row(event: dict[str, Any]) -> str:
    after = event.get("elapsed_s")
    fields = {key: value for key, value in event.items() if key not in ("kind", "time", "elapsed_s")}
    pairs = "".join(f"<span><i>{escape(key)}</i>{_value(value)}</span>" for key, value in fields.items())
    when = duration(after) if isinstance(after, int | float) else ""
    stamp = escape(str(event.get("time", "")))
    return (
        f'<tr><td class="number" title="{stamp}">{when}</td><th scope="row">{escape(str(event["kind"]))}</th>'
        f'<td class="pairs">{pairs}</td></tr>'
    )


def _table(rows: dict[str, Any]) -> str:
    return f"<table><tbody>{''.join(_row(key, value) for key, value in rows.items())}</tbody></table>"


def _row(name: str, value: Any, given: bool = False) -> str:
    style = "none" if value is None else "given" if given else ""
    cell = f'<td class="{style}">' if style else "<td>"
    return f'<tr><th scope="row">{escape(name)}</th>{cell}{_value(value)}</td></tr>'


def _value(value: Any) -> str:
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return exact(value)
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        value = ", ".join(str(item) for item in value) or "—"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return escape(text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + " …")


def _given(raw: str) -> dict[str, Any]:
    try:
        tables = toml_table(raw) if len(raw) <= _LONGEST_JOB else {}
    except ValueError:
        return {}
    return {section: fields for section, fields in tables.items() if isinstance(fields, dict)}
