"""`meshwright studio`: plans and runs in a local web page."""

from pathlib import Path

import typer

from meshwright.cli.job import JSON


def studio(
    runs: Path = typer.Option(Path("runs"), "--runs", help="The folder that holds run folders."),
    port: int = typer.Option(8787, "--port", min=0, max=65535, help="Port of the page; 0 picks a free one."),
    host: str = typer.Option(
        "127.0.0.1", "--host", help="Address to listen on; any other than the local one needs a token."
    ),
    token: str | None = typer.Option(None, "--token", help="The token that --host requires; generated if not given."),
    as_json: bool = JSON,
) -> None:
    """Explore plans and watch runs in a browser; of a run, the page changes only your note."""
    from meshwright.errors import UserError
    from meshwright.studio import Studio

    if token is not None and len(token) < 12:
        raise UserError("--token is too short to be a secret; give at least 12 characters or leave it out")
    server = Studio(runs, port, host, token)
    if as_json:
        import json

        print(json.dumps({"address": server.address, "runs": str(runs)}), flush=True)
    else:
        print(f"{server.address}  (Ctrl-C to stop)", flush=True)
    server.planner.start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
