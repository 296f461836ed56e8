"""The collective contract as `meshwright verify` prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from meshwright.verify import Contract, Outcome

SHOWN = 5
"""Violations to print; the JSON has all of them."""

COLLECTIVES = typer.Option(
    None,
    "--collectives/--no-collectives",
    help="Record every rank's collectives, check that they match up on GPUs, and, if there is a GPU here, issue each "
    "distinct one on NCCL; on by default for a matrix.",
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


def nccl_keys(outcome: Outcome | None) -> dict[str, Any] | None:
    """For the JSON; null if NCCL was not asked."""
    if outcome is None:
        return None
    return {
        "ok": outcome.ok,
        "library": outcome.library,
        "accepted": outcome.accepted,
        "groups": outcome.groups,
        "refused": outcome.refused,
        "not_replayed": outcome.not_replayed,
    }


def nccl_lines(outcome: Outcome | None) -> list[str]:
    """For people: what NCCL accepts of the recorded calls, and the first that it refuses."""
    if outcome is None:
        return ["NCCL: not run, because this machine has no CUDA device"]
    counted = f"{outcome.accepted} distinct calls accepted by {outcome.library} on this GPU (one rank)"
    lines = [f"NCCL: {counted}, {outcome.groups} groups created"]
    lines += [f"NCCL: {count} distinct calls not run: {reason}" for reason, count in outcome.not_replayed.items()]
    lines += [f"NCCL refuses {sentence}" for sentence in outcome.refused[:SHOWN]]
    more = len(outcome.refused) - SHOWN
    return lines + ([f"NCCL refuses {more} more"] if more > 0 else [])


def summary_line(contracts: list[dict[str, Any] | None]) -> str:
    """For people: all layouts of a matrix in one line."""
    proven = [contract for contract in contracts if contract is not None]
    broken = sum(not contract["ok"] for contract in proven)
    verdict = f"{broken} in violation" if broken else "same order, no deadlock"
    return f"collectives: {sum(contract['operations'] for contract in proven)} in {len(proven)} layouts, {verdict}"
