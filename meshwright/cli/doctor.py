"""`meshwright doctor`: what this machine has and what is missing."""

import typer

from meshwright.cli.job import JSON


def doctor(as_json: bool = JSON) -> None:
    """Check this machine: torch, devices, memory, backends, disk, extras, and what is missing."""
    from dataclasses import asdict

    from meshwright.cli.output import print_json, stdout_console
    from meshwright.hardware import examine

    findings = examine()
    broken = any(finding.status == "missing" for finding in findings)
    if as_json:
        print_json({"ok": not broken, "findings": [asdict(finding) for finding in findings]})
    else:
        console = stdout_console()
        styles = {"ok": "green", "warning": "yellow", "missing": "red"}
        for finding in findings:
            console.print(f"[{styles[finding.status]}]{finding.status:8}[/]", end="")
            line = f"{finding.name}: {finding.value}" + (f" ({finding.note})" if finding.note else "")
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if broken:
        raise typer.Exit(1)
