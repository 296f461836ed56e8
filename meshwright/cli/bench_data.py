"""What `meshwright bench --data` prints: the loader alone, and what a step waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.measure import DataBench


def print_data(result: DataBench, console: Console) -> None:
    """The result as a table, with how each number was measured."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows(result).items():
        table.add_row(name, value)
    console.print(table)


def _rows(result: DataBench) -> dict[str, str]:
    device = f"{result.device} × {result.devices}" if result.devices > 1 else result.device
    decoded = "" if result.decode is None else f", items decoded on the {result.decode.upper()}"
    items = "" if result.items_per_s is None else f", {result.items_per_s:,.1f} items/s"
    ranks = " per rank" if result.devices > 1 else ""
    rows = {
        "device": f"{device}, {result.cores} CPU cores",
        "loader": f"{result.workers} workers{ranks}, {result.prefetch} steps read ahead by each{decoded}",
        "alone": f"{result.samples_per_s:,.1f} samples/s, {result.tokens_per_s:,.0f} tokens/s{items}; {result.steps} "
        f"steps of {result.samples_per_step} samples after {result.warmup}, taken in {result.timed_s:.2f} s without "
        "training (a sample is a sequence)",
    }
    if result.cpu_s_per_1000_samples is not None:
        rows["CPU time"] = f"{result.cpu_s_per_1000_samples:.3f} s per 1,000 samples, of all processes that read"
    total = sum(result.stages_s.values())
    shown = [f"{name} {seconds / total:.0%}" for name, seconds in result.stages_s.items()]
    rows["stages"] = " · ".join(shown) + f" of {total:.3f} s per 1,000 samples (separate steps, one process)"
    if result.lost_items:
        rows["lost"] = f"{result.lost_items} items could not be decoded"
    if result.step_s is None:
        rows["data wait"] = f"unknown without a step: {result.step_from}; --step-time SECONDS gives one"
        return rows
    how = "in training" if result.step_from == "measured" else "as given"
    rows["step"] = (
        f"{1e3 * result.step_s:.1f} ms without data, {how}: takes {result.needed_samples_per_s:,.1f} samples/s"
    )
    if result.data_wait_share is not None:
        how = "measured in training" if result.step_from == "measured" else "computed from both rates"
        rows["data wait"] = f"{result.data_wait_share:.2%} of the time, {how}"
    return rows
