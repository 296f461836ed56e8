"""Drawings: text and picture show the simulated table; the command prints both and refuses nonsense."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshwright.pipeline import (
    SCHEDULES,
    Simulation,
    Table,
    build_table,
    column_time,
    gantt_lines,
    gantt_svg,
    share_times,
    simulate,
)

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def run(name: str, overlap: float | None = None) -> tuple[Table, Simulation]:
    table = build_table(name, 4, 8)
    return table, simulate(table, share_times(table, overlap=overlap))


def test_text_of_1f1b() -> None:
    table = build_table("1f1b", 2, 2)
    simulation = simulate(table, share_times(table))
    assert column_time([simulation], 80) == 1.0
    assert gantt_lines(table, simulation, 1.0) == [("FF··BB·BB", "01  0  1 "), ("·FBBFBB", " 00 11 ")]
    assert column_time([simulation], 3) == 3.0  # nine units into three columns


def test_text_tells_stages_and_pairs_apart() -> None:
    table, simulation = run("zb-v")
    letters = gantt_lines(table, simulation, 0.5)[3][0]
    assert letters.startswith("···FfFfFfFfiw") and set("".join(letters)) == set("·FfIiWw")
    table, simulation = run("dualpipe-v", overlap=1.0)
    lines = gantt_lines(table, simulation, 0.5)
    assert "".join(line for line, _ in lines).count("&") == len(table.overlapped) * 3  # half-size F of 1 and B of 2
    assert all(len(line) == len(numbers) for line, numbers in lines)


def bars(picture: str, kind: str = "") -> list[tuple[float, ...]]:
    """Left, top, width and height of every bar."""
    paths = [path for path in ElementTree.fromstring(picture).iter(f"{SVG}path") if kind in path.get("class", "")]
    number = r"([\d.]+)"
    bar = re.compile(rf"M{number} {number}h{number}v{number}H\1z")
    return [tuple(map(float, found)) for path in paths for found in bar.findall(path.get("d", ""))]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_has_a_bar_for_every_action_inside_the_frame(name: str) -> None:
    for overlap in (None, 0.8):
        picture = gantt_svg([run(name, overlap)])
        actions = sum(len(order) for order in run(name)[0].orders)
        drawn = bars(picture)
        assert len(drawn) == actions
        root = ElementTree.fromstring(picture)
        width, height = (float(number) for number in root.get("viewBox", "").split()[2:])
        for x, y, wide, high in drawn:
            assert 0 <= x <= width - wide and 0 <= y <= height - high
        assert len({(x, y) for x, y, _, _ in drawn}) == actions  # no bar hides another
        numbers = [text.text for text in root.iter(f"{SVG}text") if text.get("class", "").startswith("on ")]
        assert len(numbers) == actions


def test_all_schedules_share_a_time_scale_and_the_long_one_is_cut() -> None:
    runs = [run(name) for name in SCHEDULES]
    picture = gantt_svg(runs)
    words = "".join(ElementTree.fromstring(picture).itertext())
    for name in SCHEDULES:
        assert name in words
    assert words.count("cut in the picture") == 1 and "ends at 96 (cut" in words
    assert "bubble 37.5% of ideal time, 27.3% of the step" in words and "weight versions 4 3 2 1" in words
    whole = gantt_svg([one for one in runs if one[0].virtual_stages == 1])
    forwards = {width for _, _, width, _ in bars(whole, "act-F")}
    assert max(forwards) - min(forwards) < 0.15  # one unit is as wide in every panel, but for rounding


def test_the_guide_s_picture_and_table_are_the_command_s(cli) -> None:
    assert cli("schedule", "show", "--schedule", "all", "--svg", "all.svg").code == 0
    assert Path("all.svg").read_text() == (ROOT / "docs/images/schedules.svg").read_text()
    page = (ROOT / "docs/schedules.md").read_text()
    rows = dict(re.findall(r"^\| ([\w-]+) \| (.*%.*) \|$", page, re.MULTILINE))
    assert set(rows) == set(SCHEDULES)
    for row in json.loads(cli("schedule", "show", "--schedule", "all", "--json").out)["schedules"]:
        held = " ".join(f"{count * row['stage_size']:.3g}" for count in row["in_flight"])
        figures = [f"{row['bubble']:g}", f"{row['bubble_over_ideal']:.1%}", f"{row['bubble_share_of_step']:.1%}"]
        figures += [held, str(row["parameter_copies"]), f"{row['transfers'] / 48:.2f}"]
        assert rows[row["schedule"]].split(" | ") == figures


def test_show_prints_figures_and_json(cli) -> None:
    shown = cli("schedule", "show", "--pp", "4", "--micro-batches", "8", "--schedule", "zb-v")
    assert shown.code == 0 and "6.2% over ideal time, 5.9% of the step" in shown.out
    assert "rank 3  ···FfFf" in shown.out and "4 4 4 4" in shown.out and "parameter copies 1" in shown.out
    slow = cli("schedule", "show", "--schedule", "1f1b", "--backward", "3", "--send", "0.5", "--json")
    row = json.loads(slow.out)["schedules"][0]
    assert row["ideal"] == 8 * 4.0 and row["bubble"] > 3 * 4.0
    assert len(row["actions"]) == 4 * 8 * 2 and row["actions"][0] == {
        "rank": 0, "start": 0.0, "end": 1.0, "action": "F", "micro_batch": 0, "stage": 0,
    }  # fmt: skip


def test_all_leaves_out_what_does_not_fit_and_says_why(cli) -> None:
    shown = cli("schedule", "show", "--schedule", "all", "--pp", "3", "--micro-batches", "5")
    assert shown.code == 0 and shown.out.count("left out: ") == 4 and "needs an even number of ranks" in shown.out
    data = json.loads(cli("schedule", "show", "--schedule", "all", "--pp", "3", "--micro-batches", "5", "--json").out)
    assert set(data["refused"]) == {"interleaved", "zb-interleaved", "dualpipe-v", "dualpipe"}
    assert len(data["schedules"]) + len(data["refused"]) == len(SCHEDULES)


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--schedule", "interleaved", "--micro-batches", "6"], "a multiple of 4"),
        (["--schedule", "zb"], 'layout.schedule = "zb"'),
        (["--forward", "0"], "--forward = 0"),
        (["--overlap", "nan"], "--overlap = nan"),
        (["--send", "-1"], "--send = -1"),
        (["--svg", "no/such/folder.svg"], "--svg = no/such/folder.svg"),
        (["--schedule", "all", "--pp", "0"], "layout.pp = 0"),
    ],
)
def test_mistakes_are_one_sentence(cli, arguments: list[str], words: str) -> None:
    result = cli("schedule", "show", *arguments)
    assert result.code == 2 and words in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_show_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['meshwright', 'schedule', 'show', '--schedule', 'all', '--svg', 'all.svg']\n"
        "from meshwright.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
