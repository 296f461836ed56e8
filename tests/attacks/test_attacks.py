"""The attack's short form: some cases of each family, none of which may break anything."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import attack
from attacks.case import Case, Family, InternalError, LostSteps, run_case
from attacks.families import FAMILIES

from meshwright.errors import UserError

SHORT = 12
SHORTER = dict.fromkeys(("kills", "full disk", "normalizers", "surroundings"), 6)
"""Their cases are trainings, or take as long."""


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_nothing_breaks(family: Family) -> None:
    cases = SHORTER.get(family.name, SHORT)
    outcomes = attack.attack([family], seed=1, cases=cases)[family.name]
    assert len(outcomes) == cases
    if (reason := family.unavailable()) is not None:
        pytest.skip(reason)
    assert [outcome for outcome in outcomes if outcome.verdict in attack.BROKEN] == []


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        (lambda folder: None, "survived"),
        (lambda folder: _raise(UserError("run.folder is …")), "refused"),
        (lambda folder: _raise(UserError("")), "internal error"),  # a refusal that says nothing
        (lambda folder: _raise(ValueError("oh")), "internal error"),
        (lambda folder: _raise(InternalError("exit 1")), "internal error"),
        (lambda folder: _raise(LostSteps("row 3")), "lost steps"),
        (lambda folder: __import__("os").kill(__import__("os").getpid(), 9), "internal error"),
        (lambda folder: __import__("time").sleep(60), "hang"),
        (lambda folder: bytearray(3 << 28).count(1) and None, "memory"),
    ],
)
def test_what_breaks_is_seen(run, verdict: str) -> None:
    seconds = 2.0 if verdict == "hang" else 60.0
    assert run_case(Case("x", run, seconds=seconds, memory_gib=0.5)).verdict == verdict


def test_a_seed_draws_the_same_cases_again() -> None:
    for family in FAMILIES:
        first, again = ([case.name for case in attack.cases_of(family, 3, 20)] for _ in range(2))
        assert first == again


def test_a_family_that_cannot_run_here_is_counted_as_not_run(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def draw(chance):
        raise AssertionError("a case was drawn")

    families = [Family("stores", draw, unavailable=lambda: "no store is installed (pip install it)")]
    monkeypatch.setattr(attack, "FAMILIES", families)
    monkeypatch.setattr(sys, "argv", ["attack.py", "--cases", "7"])
    with pytest.raises(SystemExit) as ended:
        attack.main()
    told = capsys.readouterr().out.splitlines()
    assert not ended.value.code
    assert "stores: 7 cases were not run: no store is installed (pip install it)" in told
    assert told[1].split() == ["stores", "7", *["0"] * 6, "7", "0"]  # refused, survived, four kinds of broken
