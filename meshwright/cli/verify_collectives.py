"""The collective contract as `meshwright verify` prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from meshwright.verify import Contract

SHOWN = 5
"""Violations to print; the JSON has all of them."""

COLLECTIVES = typer.Option(
    None,
    "--collectives/--no-collectives",
    help="Record every rank's collectives and check that they match up on GPUs; on by default for a matrix.",
)


def contract_keys(contract: Contract | None) -> dict[str, Any] | None:
    """For the JSON; null if nothing was recorded."""
    if contract is None:
        return None
    return {
        "ok": contract.ok,
        "ranks": contract.ranks,
        "operations": contract.operations,
        "groups": contract.groups,
        "violations": list(contract.violations),
    }


def contract_lines(contract: Contract | None) -> list[str]:
    """For people: one line if all is well, otherwise the first violations."""
    if contract is None:
        return ["collectives: not recorded, because NCCL itself ran them"]
    if contract.ok:
        counted = f"{contract.operations} of {contract.ranks} ranks, {contract.groups} groups"
        return [f"collectives: {counted}, same order, no deadlock"]
    more = len(contract.violations) - SHOWN
    lines = [f"collectives: {sentence}" for sentence in contract.violations[:SHOWN]]
    return lines + ([f"collectives: {more} more"] if more > 0 else [])


def summary_line(contracts: list[dict[str, Any] | None]) -> str:
    """For people: all layouts of a matrix in one line."""
    proven = [contract for contract in contracts if contract is not None]
    broken = sum(not contract["ok"] for contract in proven)
    verdict = f"{broken} in violation" if broken else "same order, no deadlock"
    return f"collectives: {sum(contract['operations'] for contract in proven)} in {len(proven)} layouts, {verdict}"
