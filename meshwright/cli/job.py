"""`meshwright job`: what a job file means."""

import typer

app = typer.Typer(help="Explain a job file, or print its schema.", no_args_is_help=True)

JOB = typer.Argument(help="A job file, or a recipe's name such as demo.")
SET = typer.Option([], "--set", metavar="SECTION.FIELD=VALUE", help="Override a field; may be given again.")
JSON = typer.Option(False, "--json", help="Print JSON.")


@app.command()
def explain(job: str = JOB, overrides: list[str] = SET, as_json: bool = JSON) -> None:
    """Print every field of a job: value, where it came from, what it means."""
    from meshwright.cli.output import print_json, stdout_console
    from meshwright.job import job_fields, load_job

    loaded = load_job(job, overrides)
    values = loaded.job.model_dump(mode="json")
    rows = []
    for name, meaning in job_fields():
        section, field = name.split(".")
        rows.append({"field": name, "value": values[section][field], "origin": loaded.origin(name), "meaning": meaning})
    if as_json:
        print_json({"job": loaded.name, "accumulation": loaded.job.accumulation, "fields": rows})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("field", "value", "origin", "meaning"):
        table.add_column(column, overflow="fold")
    for row in rows:
        style = None if row["origin"] == "default" else "bold"
        table.add_row(row["field"], _shown(row["value"]), row["origin"], row["meaning"], style=style)
    stdout_console().print(table)


@app.command()
def schema() -> None:
    """Print the JSON schema of a job file, for editors that complete and check it."""
    from meshwright.cli.output import print_json
    from meshwright.job import job_schema

    print_json(job_schema())


def _shown(value: object) -> str:
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
