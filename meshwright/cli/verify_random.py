"""`meshwright verify --random`: random jobs, each equal to one process or rejected in one sentence."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from meshwright.cli.verify_verdict import say
from meshwright.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.verify import Answer, Draw


def verify_random(
    count: int, seed: int, only: str | None, dtype: str, device: str, collectives: bool, as_json: bool
) -> bool:
    """Draw and verify jobs 1 to count of a seed, or one of them; return whether nothing was wrong."""
    from meshwright.cli.output import print_json, stderr_console, stdout_console
    from meshwright.verify import draw, run_draws

    draws = [draw(seed, number) for number in _numbers(count, only)]
    answers, console, started = list[Any](), stdout_console(), time.monotonic()
    with stderr_console().status("") as status:
        show = lambda line: status.update(f"{len(answers)}/{len(draws)}  {line.name}")  # noqa: E731
        for answer in run_draws(draws, dtype, device, collectives, began=show):
            answers.append(answer)
            if not as_json:
                _print_answer(console, answer)
    seconds = time.monotonic() - started
    if as_json:
        print_json(_json(seed, dtype, seconds, answers))
    else:
        _print_table(console, answers, seconds)
    return not any(answer.wrong for answer in answers)


def _numbers(count: int, only: str | None) -> list[int]:
    if only is None:
        return list(range(1, count + 1))
    if not only.isdigit() or not 1 <= int(only) <= count:
        raise UserError(
            f'--only "{only}" is not the number of a drawn job; give one from 1 to {count}, the value of --random'
        )
    return [int(only)]


def _print_answer(console: Console, answer: Answer) -> None:
    mark = answer.outcome.upper() if answer.wrong else answer.outcome
    took = "" if answer.verdict is None else f"{answer.verdict.seconds:.1f} s"
    say(console, f"{mark:<16}  {took:>6}  {answer.draw.name}")
    if answer.outcome != "equal":
        say(console, f"    {_why(answer)}")
    if answer.wrong:
        say(console, f"\n{_job_file(answer.draw)}")


def _why(answer: Answer) -> str:
    first = None if answer.verdict is None else answer.verdict.first_wrong
    if first is None:
        return answer.sentence or ""
    note = f" ({first.note})" if first.note else ""
    return f"first difference: {first.kind} of {first.name}, off by {first.error:.1e}{note}"


def _job_file(draw: Draw) -> str:
    """The job as it was drawn, and the command to reproduce it."""
    from meshwright.job import job_text

    again = f"reproduce with: meshwright verify --random {draw.number} --seed {draw.seed} --only {draw.number}"
    try:
        return job_text(draw.job, again)
    except UserError:  # the table is not a valid job
        return f"# {again}\n"


def _print_table(console: Console, answers: list[Answer], seconds: float) -> None:
    from meshwright.verify import subject_of

    counts = Counter(answer.outcome for answer in answers)
    for outcome in ("refused", "refused in ranks"):
        reasons = Counter(subject_of(answer.sentence or "") for answer in answers if answer.outcome == outcome)
        for reason, number in reasons.most_common():
            say(console, f"{number:5}  {outcome}: {reason}")
    for outcome, number in counts.most_common():
        if not outcome.startswith("refused") or outcome == "refused badly":
            say(console, f"{number:5}  {outcome}")
    compared = [answer for answer in answers if not answer.outcome.startswith("refused")]
    shares = [f"{name} {number / len(compared):.0%}" for name, number in _features(compared).items()]
    say(console, f"features of {len(compared)} that ran: {', '.join(shares) or 'none'}")
    wrong = [str(answer.draw.number) for answer in answers if answer.wrong]
    verdict = f"wrong: {', '.join(wrong)}" if wrong else "nothing wrong"
    say(console, f"{len(answers)} drawn, {verdict} ({seconds:.0f} s)")


def _features(answers: list[Answer]) -> dict[str, int]:
    """How many jobs have each feature, the most frequent first."""
    from meshwright.verify import features_of

    return dict(Counter(name for answer in answers for name in features_of(answer.draw.job)).most_common())


def _json(seed: int, dtype: str, seconds: float, answers: list[Answer]) -> dict[str, Any]:
    from meshwright.verify import OUTCOMES, subject_of

    counts = Counter(answer.outcome for answer in answers)
    compared = [answer for answer in answers if not answer.outcome.startswith("refused")]
    refused = [subject_of(answer.sentence or "") for answer in answers if answer.outcome.startswith("refused")]
    return {
        "equal": not any(answer.wrong for answer in answers),
        "seed": seed,
        "dtype": dtype,
        "seconds": seconds,
        "counts": {outcome: counts[outcome] for outcome in OUTCOMES},
        "features": _features(compared),
        "refused": dict(Counter(refused).most_common()),
        "layouts": [_answer(answer) for answer in sorted(answers, key=lambda answer: answer.draw.number)],
    }


def _answer(answer: Answer) -> dict[str, Any]:
    from meshwright.verify import worst

    verdict = answer.verdict
    top = None if verdict is None else worst(verdict.rows).error
    return {
        "number": answer.draw.number,
        "name": answer.draw.name,
        "outcome": answer.outcome,
        "why": None if answer.outcome == "equal" else _why(answer),
        "worst": top,
        "seconds": None if verdict is None else verdict.seconds,
        "job": answer.draw.table,
    }
