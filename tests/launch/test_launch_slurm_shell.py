"""Whatever text gets through the job's door, the batch script says it as a word: nothing foreign is run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from attacks.shell_strings import CONTROLS, PIECES, executed

from meshwright.errors import UserError
from meshwright.hardware import Site, find_site
from meshwright.job import load_job
from meshwright.launch.slurm import Shape, batch_script, request_of
from meshwright.runs.lifecycle import run_path

hostile = st.lists(st.sampled_from([*PIECES, *CONTROLS, "b", "c"]), min_size=1, max_size=5).map("".join)


def site(**fields: object) -> Site:
    return Site.model_validate({"name": "x", "title": "x", "gpus_per_node": 2, "python": "mw", **fields})


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(hostile, hostile, hostile, st.sampled_from([1, 2]), st.booleans())
def test_no_string_becomes_a_command(
    tmp_path_factory: pytest.TempPathFactory, folder: str, asked: str, prompt: str, ranks: int, per_rank: bool
) -> None:
    tmp_path = tmp_path_factory.mktemp("shell")
    overrides = [f"evaluation.sample_prompt={json.dumps(prompt)}"]
    try:
        run = run_path(load_job("demo", [f"run.folder={json.dumps(f'{tmp_path}/run/{folder}')}", *overrides]))
        here = site(title=asked, modules=[asked], environment={"A": asked}, directives=[f"--x={asked}"])
        request = request_of(here, "10", asked, asked, asked, 60, per_rank, None, (asked,))
        script = batch_script(run, run.name, here, Shape(1, ranks), request, "requeue", overrides=overrides)
    except (UserError, ValueError):
        return
    assert executed(script, tmp_path)[:6] == ["-P", "-m", "meshwright", "train", str(run.absolute()), "--resume"]


@pytest.mark.parametrize("place", ["account", "partition", "qos", "container", "options"])
def test_a_line_end_is_refused_wherever_it_would_end_a_line(tmp_path: Path, place: str) -> None:
    given: dict[str, Any] = {
        "time": "10",
        "account": None,
        "partition": None,
        "qos": None,
        "signal_s": 60,
        "per_rank": False,
    }
    given |= {"container": None, place: ("a\nb",) if place == "options" else "a\nb"}
    here = site(container_command="image")
    with pytest.raises(UserError, match=r"contains the control character U\+000A"):
        batch_script(tmp_path, "x", here, Shape(1, 1), request_of(here, **given), "requeue")
    plain = request_of(here, "10", None, None, None, 60, False, None)
    with pytest.raises(UserError, match=r"run\.folder = .* contains the control character U\+000A"):
        batch_script(tmp_path / "a\ntouch b", "x", here, Shape(1, 1), plain, "requeue")
    assert "\npwn" not in batch_script(tmp_path, "a\npwn", here, Shape(1, 1), plain, "requeue")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('environment = { "A=1; touch x; B" = "1" }', "is not a variable name"),
        ('title = "a\\nb"', "control character U\\+000A"),
        ('modules = ["a\\u0000"]', "control character U\\+0000"),
        ('python = "a\\nb"', "control character U\\+000A"),
        ("extends = [1]", "is not a known site"),
        ("x = " + "[" * 9000, "nested too deeply"),
    ],
)
def test_a_profile_s_words_are_words(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "own.toml").write_text(f"gpus_per_node = 4\n{line}\n")
    with pytest.raises(UserError, match=f"(?i){sentence}"):
        find_site(str(tmp_path / "own.toml"))
