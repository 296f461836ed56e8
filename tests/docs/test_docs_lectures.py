"""The ledger of the lectures: every command prints the values in its row, every comparison and figure is computed anew.

With REFRESH=1 values that have words with their number are written anew; bare numbers are left for a person.
"""

import io
import os
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from docs_pages import ROOT
from lecture_sums import SUMS
from ledger import PAGE, SUM, VERDICTS, Comparison, Row, measured_holds, number_of, renewed, rows, shows, verdict_of

ROWS = rows()
COMMANDS = list(dict.fromkeys(command for row in ROWS for command in row.commands))
NAMED = """
Megatron-LM DeepSpeed DDP DataParallel FSDP FairScale "LLM Foundry" Modalities nanoGPT nanotron Ray Energon DualPipe
GPipe PipeDream "Zero bubble" "Ring attention" "Flash attention" Transformers W&B Slurm DALI PyNvVideoCodec NVJPEG NCCL
InfiniBand "Optical flow" LUMI Leonardo MareNostrum5 MeluXina Vega Discoverer Karolina Deucalion Jupiter Berzelius MoE
"online RL" Superchips "sparse attention" TPU
"""
"""Systems, machines and methods that the lectures name: each is what a row is about."""


def refresh(row: Row, text: str) -> None:
    lines = PAGE.read_text(encoding="utf-8").split("\n")
    [place] = [
        number
        for number, line in enumerate(lines)
        if line.startswith(f"| {row.said} | ") and all(f"`{command}`" in line for command in row.commands)
    ]
    for value in row.values:
        lines[place] = lines[place].replace(f"`{value}`", f"`{renewed(text, value)}`")
    PAGE.write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every command of the page prints, both streams, in this process: the planner then makes each model once.

    A refusal is an answer too, an internal error is none.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("ledger"))
        patch.setenv("COLUMNS", "250")
        patch.setenv("MESHWRIGHT_PROFILES", "none")  # what was measured on this machine is no part of the page
        return {command: output_of(command, patch) for command in COMMANDS}


def output_of(command: str, patch: pytest.MonkeyPatch) -> str:
    if command.startswith(SUM):
        return "\n".join(SUMS[command.removeprefix(SUM)]())
    from meshwright.cli import main

    patch.setattr(sys, "argv", shlex.split(command))
    text, code = io.StringIO(), 0
    with redirect_stdout(text), redirect_stderr(text):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    assert code in (0, 2) and "internal error" not in text.getvalue(), f"{command}\n{text.getvalue()}"
    return text.getvalue()


@pytest.mark.thorough
@pytest.mark.parametrize("row", [row for row in ROWS if row.commands], ids=lambda row: row.said[:60])
def test_commands_print_the_values_beside_them(row: Row, printed: dict[str, str]) -> None:
    text = "\n".join(printed[command] for command in row.commands)
    missing = [value for value in row.values if not shows(text, value)]
    if missing and os.environ.get("REFRESH"):
        refresh(row, text)
    assert row.values and not missing, f"{missing} in none of what {row.commands} prints:\n{text}"


@pytest.mark.thorough
def test_a_row_whose_job_does_not_fit_says_so(printed: dict[str, str]) -> None:
    large = [row for row in ROWS if any("does not fit" in printed[command] for command in row.commands)]
    assert [row.said for row in large if "does not fit" not in row.line] == [] and len(large) >= 5


@pytest.mark.thorough
@pytest.mark.parametrize("row", [row for row in ROWS if row.comparisons], ids=lambda row: row.said[:60])
def test_the_lectures_number_and_ours_relate_as_written_and_as_the_verdict_says(
    row: Row, printed: dict[str, str]
) -> None:
    figures = [figure.partition(" = ")[0] for figure in row.measured]
    text = "\n".join([*(printed[command] for command in row.commands), *figures])
    comparisons = [Comparison.of(one) for one in row.comparisons]
    for one in comparisons:
        assert shows(row.said, number_of(one.said.lstrip("<>"))), f"the row does not say {one.said}"
        printed_or_measured = shows(text, number_of(one.ours)) or shows(text, one.ours)
        assert printed_or_measured, f"{one.ours} is neither printed nor measured:\n{text}"
    agrees = {one.check() for one in comparisons} == {True}
    assert verdict_of(row.verdict) == ("right" if agrees else "corrected"), f"{row.verdict}, but agrees is {agrees}"


@pytest.mark.parametrize("figure", list(dict.fromkeys(one for row in ROWS for one in row.measured)))
def test_measured_figures_are_those_of_their_files(figure: str) -> None:
    assert measured_holds(figure), figure


def test_every_row_has_a_verdict_and_an_answer_or_says_that_there_is_none() -> None:
    unanswered = [row for row in ROWS if not row.commands and not row.tests]
    verdicts = [verdict_of(row.verdict) for row in ROWS]
    assert {verdict_of(row.verdict) for row in unanswered} <= {"not supported", "opinion", "cannot be held here"}
    counted = ", ".join(f"{verdicts.count(word)} {word}" for word in VERDICTS)
    assert counted in " ".join(PAGE.read_text(encoding="utf-8").split()), (
        f"the page's first lines should say: {counted}"
    )
    assert len(ROWS) >= 280 and len(unanswered) <= 25, [row.said for row in unanswered]
    assert sum(bool(row.comparisons) for row in ROWS) >= 49 and verdicts.count("corrected") >= 30


def test_every_test_named_is_there() -> None:
    missing = []
    for name in dict.fromkeys(test for row in ROWS for test in row.tests):
        path, _, function = name.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        if not text or (function and f"def {function}(" not in text):
            missing.append(name)
    assert missing == []


def test_every_system_that_the_lectures_name_has_a_row() -> None:
    said = "\n".join(row.said for row in ROWS).lower()
    assert [name for name in shlex.split(NAMED) if not shows(said, name.lower())] == []


def test_every_sum_is_used() -> None:
    used = {command.removeprefix(SUM) for command in COMMANDS if command.startswith(SUM)}
    assert used == set(SUMS)


def test_a_drifted_value_would_be_seen() -> None:
    text = "weights                    29.91\nactivations 39.57 GiB, 66,445 tokens/s"
    assert shows(text, "weights 29.91") and shows(text, "66,445 tokens/s") and shows(text, "39.57")
    for wrong in ("weights 29.9", "weights 29.92", "6,445 tokens/s", "9.57", "66"):
        assert not shows(text, wrong)


@pytest.mark.parametrize(
    ("text", "agrees"),
    [
        ("32 GB → 29.92 GiB: 1.00×", True),
        ("150 days → 106.9 days: 0.71×", False),
        ("2–4× → 3.1×: inside", True),
        ("2–4× → 10×: 2.5×", False),
        ("40–60% → 62.8%: 1.05×", True),
        (">10 P → 35 P: holds", True),
        ("<0.5% → 4.86%: fails", False),
        ("100 GB → 115 GB: 1.15× (±20%)", True),
    ],
)
def test_comparisons(text: str, agrees: bool) -> None:
    assert Comparison.of(text).check() is agrees


@pytest.mark.parametrize(
    "text", ["32 GB → 29.92 GiB: 1.01×", "2–4× → 5×: inside", ">10 → 9: holds", "1 GB → 1 days: 1.00×", "1 → 1"]
)
def test_a_comparison_that_is_not_so_is_refused(text: str) -> None:
    with pytest.raises(AssertionError):
        Comparison.of(text).check()


def test_a_figure_of_another_key_is_seen() -> None:
    speed = "recompute-h200: results / modes=full; micro_batch=8 / tokens_per_s"
    assert measured_holds(f"45,079 tokens/s = {speed}") and not measured_holds(f"51,762 tokens/s = {speed}")
    for start in ("results", "…"):
        quotient = f"{speed} ÷ {start} / modes=none; micro_batch=8 / tokens_per_s"
        assert measured_holds(f"0.871 = {quotient}") and not measured_holds(f"0.872 = {quotient}")
    heading = "LOG.md: overlap of gathers"
    assert measured_holds(f"2.29 s = {heading}") and not measured_holds(f"45,079 = {heading}")


@pytest.mark.parametrize("cell", ["predicted", "right, but", "corrected", "not supported", "nearly: so"])
def test_other_verdicts_are_refused(cell: str) -> None:
    with pytest.raises(AssertionError):
        verdict_of(cell)
