"""`meshwright submit`, `status`, `logs`, `cancel`: runs on a Slurm cluster, or elsewhere with `--on`."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli import submit_kubernetes as kubernetes
from meshwright.cli.job import JOB, JSON, SET, TRUST

if TYPE_CHECKING:
    from meshwright.launch.slurm import Status

ON = typer.Option("slurm", "--on", metavar="PLACE", help="Where it runs: slurm, ray, kubernetes or sky.")
ADDRESS = typer.Option(
    None, "--address", metavar="HOST:PORT", help="With --on ray: the cluster; by default RAY_ADDRESS, or the one here."
)
MIN_RANKS = typer.Option(
    None, "--min-ranks", min=1, help="With --on ray: run on this many ranks or more while machines are missing."
)
SHIP = typer.Option(False, "--ship", help="With --on ray: send this installation of meshwright to the machines.")
SITE = typer.Option(
    None, "--site", help="A known site such as leonardo, or your own profile file; by default the job's cluster.name."
)
TIME = typer.Option(None, "--time", help="A job's time limit in Slurm's format, e.g. 12:00:00.")
ACCOUNT = typer.Option(None, "--account", help="The project to charge.")
PARTITION = typer.Option(None, "--partition", help="A partition other than the one in the site's profile.")
QOS = typer.Option(None, "--qos", help="Slurm's quality of service.")
SIGNAL = typer.Option(
    300, "--signal-before", min=1, help="Seconds before the limit, or before a pod is killed, to save and exit in."
)
CHAIN = typer.Option(1, "--chain", min=1, help="Submit this many jobs in sequence, instead of requeueing one.")
PER_RANK = typer.Option(False, "--per-rank", help="One Slurm task per rank, instead of torch's agent on every node.")
CONTAINER = typer.Option(None, "--container", help="Run in this image.")
OPTION = typer.Option([], "--sbatch", metavar="WORD", help="An extra option for sbatch; may be repeated.")
LADDER = typer.Option(
    False, "--ladder", help="First a rehearsal, then trials on 1 GPU, 1 node and 2 nodes; each must pass."
)
BUDGET = typer.Option(None, "--budget", min=0.0, help="With --ladder: GPU-hours the run may take.")
DRY = typer.Option(False, "--dry-run", help="Only print the scripts or manifests; submit nothing.")
KIND = typer.Option(None, "--kind", help="On Kubernetes: jobset (the default), pytorchjob or rayjob.")
NAMESPACE = typer.Option(None, "--namespace", help="On Kubernetes: the namespace; by default kubectl's.")
VOLUME = typer.Option(None, "--volume", help="On Kubernetes and sky: the volume that all nodes share.")
WRITE = typer.Option(None, "--write", metavar="FILE", help="On Kubernetes and sky: write the manifest; submit nothing.")
FORCE = typer.Option(False, "--force", help="Overwrite the file of --write.")
OPTIONS = {
    "slurm": {"site", "time", "account", "partition", "qos", "chain", "per-rank", "container", "sbatch", "ladder"}
    | {"budget", "dry-run"},
    "ray": {"address", "min-ranks", "ship"},
    "kubernetes": {"site", "container", "kind", "namespace", "volume", "write", "force", "dry-run"},
    "sky": {"site", "container", "volume", "write", "force", "dry-run"},
}
"""The places where a job may run, and the options that only some of them have."""
RUN = typer.Argument(help="A run folder, or kubernetes:NAMESPACE/NAME.")


def submit(
    job: str = JOB,
    overrides: list[str] = SET,
    on: str = ON,
    address: str | None = ADDRESS,
    min_ranks: int | None = MIN_RANKS,
    ship: bool = SHIP,
    site: str | None = SITE,
    time: str | None = TIME,
    account: str | None = ACCOUNT,
    partition: str | None = PARTITION,
    qos: str | None = QOS,
    signal_before: int = SIGNAL,
    chain: int = CHAIN,
    per_rank: bool = PER_RANK,
    container: str | None = CONTAINER,
    options: list[str] = OPTION,
    ladder: bool = LADDER,
    budget: float | None = BUDGET,
    kind: str | None = KIND,
    namespace: str | None = NAMESPACE,
    volume: str | None = VOLUME,
    write: Path | None = WRITE,
    force: bool = FORCE,
    dry_run: bool = DRY,
    trust: bool = TRUST,
    as_json: bool = JSON,
) -> None:
    """Submit a job to a cluster (Slurm, Ray, Kubernetes), or continue a run folder; it goes on until its last step."""
    from meshwright.errors import UserError
    from meshwright.hardware import find_site
    from meshwright.job import load_job, require_base, require_data
    from meshwright.launch.slurm import request_of

    given: dict[str, object] = {
        "time": time,
        "account": account,
        "partition": partition,
        "qos": qos,
        "budget": budget is not None,
    }
    given |= {"chain": chain > 1, "per-rank": per_rank, "sbatch": options, "ladder": ladder, "dry-run": dry_run}
    given |= {"address": address, "min-ranks": min_ranks, "ship": ship, "site": site, "container": container}
    given |= {"kind": kind, "namespace": namespace, "volume": volume, "write": write, "force": force}
    _require_place(on, [name for name, value in given.items() if value])
    if on == "ray":
        _on_ray(job, overrides, address, min_ranks, ship, trust, as_json)
        return
    if budget is not None and not ladder:
        raise UserError(f"--budget {budget:g} is checked by the trials; add --ladder")
    loaded = load_job(job, overrides, trust=trust)
    require_base(loaded.job)
    require_data(loaded.job.data)
    if on in kubernetes.PLACES:
        asked = kubernetes.Asked(kind, namespace, volume, write, force)
        kubernetes.submit(on, loaded, asked, site, container, signal_before, dry_run, as_json)
        return
    named = loaded.job.cluster.name
    foreign = loaded.from_run and loaded.origin("cluster.name") == "file" and not trust
    if site is None and foreign and Path(str(named)).is_file():
        raise UserError(
            f'{job} names cluster.name = "{named}", whose contents a script would run; read it, then add --trust'
        )
    if site is None and named is None:
        raise UserError("submit needs --site, e.g. --site leonardo, or a job with cluster.name; give one of them")
    profile = find_site(site) if site is not None else find_site(str(named), "cluster.name")
    request = request_of(
        profile, time, account, partition, qos, signal_before, per_rank, container, options=tuple(options)
    )

    from meshwright.cli.output import print_json, stderr_console
    from meshwright.launch.slurm.submit import plan_submission
    from meshwright.launch.slurm.submit import submit as hand_over

    console = stderr_console()

    def tell(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    plan = plan_submission(job, loaded, profile, request, chain, ladder, budget, tell, overrides, dry_run)
    if dry_run:
        scripts = plan.scripts()
        if as_json:
            print_json({"run": str(plan.run), "jobs": [], "scripts": scripts})
        else:
            print("\n".join(scripts.values()), end="")
        return
    submission = hand_over(plan)
    if as_json:
        scripts = {name: str(plan.run / name) for name in plan.scripts()}
        print_json({"run": str(plan.run), "jobs": [*submission.ladder, *submission.jobs], "scripts": scripts})
        return
    jobs, run = ", ".join([*submission.ladder, *submission.jobs]), shlex.quote(str(plan.run))
    print(f"submitted {jobs} for {run}\nsee      meshwright status {run}\nscript   {run}/slurm/run.sh")


def _require_place(on: str, options: list[str]) -> None:
    """Refuse an unknown place, and options that the place does not have."""
    from meshwright.errors import UserError

    if on not in OPTIONS:
        *others, last = OPTIONS
        raise UserError(f"--on {on} is not known; use {', '.join(others)} or {last}")
    if foreign := next((name for name in options if name not in OPTIONS[on]), None):
        raise UserError(f"--{foreign} is not for --on {on}; leave it out")


def _on_ray(
    job: str, overrides: list[str], address: str | None, min_ranks: int | None, ship: bool, trust: bool, as_json: bool
) -> None:
    from meshwright.cli.output import print_json, stderr_console
    from meshwright.job import load_job
    from meshwright.launch.ray_submit import full_layout
    from meshwright.launch.ray_submit import submit as hand_over

    def tell(text: str) -> None:
        stderr_console().print(text, markup=False, highlight=False, soft_wrap=True)

    changes = full_layout(job, overrides)
    loaded = load_job(job, changes, trust=trust)
    asked = hand_over(job, loaded, address, min_ranks, ship, changes, tell)
    if as_json:
        print_json({"run": asked.run, "jobs": [asked.name], "scripts": {}})
        return
    run = shlex.quote(asked.run)
    print(f"submitted {run} to the Ray cluster at {asked.address}\nsee       meshwright status {run}")


def status(
    run: Path | None = typer.Argument(
        None, help="A run folder, or kubernetes:NAMESPACE/NAME; with --all, the folder of many runs (runs)."
    ),
    every: bool = typer.Option(False, "--all", help="Every run of a folder, newest first."),
    as_json: bool = JSON,
) -> None:
    """Print a run's state in one word: pending, running, requeued, done, stopped, cancelled, failed, oom, timeout,
    rehearsed or damaged."""
    from meshwright.cli.output import print_json, stdout_console
    from meshwright.errors import UserError
    from meshwright.launch.submitted import status_of, statuses

    if run is None and not every:
        raise UserError("status needs a run folder, or --all for every run in ./runs; give one of them")
    if (there := kubernetes.reference(run)) and not every:
        from meshwright.launch.kubernetes import status_of as state_of

        found = [state_of(there)]
    else:
        found = statuses(run or Path("runs")) if every else [status_of(run or Path())]
    if as_json:
        print_json([asdict(one) for one in found] if every else asdict(found[0]))
        return
    stdout_console().print(_table(found))


def logs(
    run: Path = RUN,
    rank: int | None = typer.Option(
        None, "--rank", min=0, help="One rank's log; by default the jobs' logs with rank 0's."
    ),
    follow: bool = typer.Option(False, "--follow", help="Keep printing new lines until the run ends."),
    as_json: bool = JSON,
) -> None:
    """Print what a run's jobs and ranks wrote; of a run on this machine, what rank 0 recorded."""
    from meshwright.cli.output import print_json
    from meshwright.errors import UserError
    from meshwright.launch.ray import NoCluster
    from meshwright.launch.slurm import NoAnswer, RecordedLog, end_of, files_log, is_recorded, log_files
    from meshwright.launch.slurm import follow as read
    from meshwright.launch.submitted import status_of

    if there := kubernetes.reference(run):
        kubernetes.print_logs(there, rank, follow, as_json)
        return
    recorded = RecordedLog(run) if is_recorded(run, rank) else None
    if as_json:
        if follow:
            raise UserError("--json prints one document and cannot follow; leave out --json or --follow")
        texts = {str(path): end_of(path) for path in log_files(run, rank)} if recorded is None else recorded.texts()
        print_json({"run": str(run), "files": texts})
        return

    state = ""

    def alive() -> bool:
        nonlocal state
        try:
            state = status_of(run).state if follow else ""
        except (NoAnswer, NoCluster):
            if not state:
                raise
        return state in ("pending", "running", "requeued")  # if the cluster is down for a while, the last known state

    def found() -> list[Path]:
        try:
            return log_files(run, rank)
        except UserError:
            if rank is None and alive() and any((run / name).is_dir() for name in ("slurm", "ray")):
                return []  # a pending job has written nothing yet
            raise

    for text in read(files_log(found) if recorded is None else recorded.new, alive):
        print(text, end="", flush=True)


def cancel(
    run: Path = RUN,
    wait_s: float = typer.Option(600.0, "--wait", min=0.0, help="Seconds to let the run save before it is killed."),
    as_json: bool = JSON,
) -> None:
    """Cancel a run's jobs: the running one finishes its step and saves, and none restarts."""
    from meshwright.cli.output import print_json, stdout_console
    from meshwright.launch.submitted import cancel as end

    if there := kubernetes.reference(run):
        from meshwright.launch.kubernetes import cancel as end_there

        ended = end_there(there, wait_s)
    else:
        ended = end(run, wait_s)
    if as_json:
        print_json(asdict(ended))
        return
    stdout_console().print(_table([ended]))


def _table(found: "list[Status]") -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "state", "step", "why", "job", "nodes"):
        table.add_column(name, overflow="fold")
    for one in found:
        step = "" if one.state == "rehearsed" else f"{one.step}/{one.steps}"  # which takes none
        cells = (one.run, one.state, step, one.why, one.job or "", one.nodes)
        table.add_row(*map(Text, cells))  # no markup: a run's text may contain brackets
    return table
