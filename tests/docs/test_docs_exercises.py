"""The exercises: every solution passes its checker, every broken variant is told what is wrong, every task is open."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from meshwright.verify import grade_layer

FOLDER = Path(__file__).parents[2] / "docs" / "exercises"
EXERCISES = ("one_device", "data_parallel", "fully_sharded", "tensor_parallel")
TOLD = {
    "one_device": "the first loss is right, but the gradient of tokens.weight is 0 times what one device has",
    "data_parallel": "the loss of the first step is",
    "fully_sharded": "the first loss is right, but the gradient of tokens.weight is 0.5 times what one device has",
    "tensor_parallel": "the first loss is right, but the gradient of tokens.weight is not what one device has",
}


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("exercise_check", FOLDER / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # ranks send what they found by its class's name
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_passes_and_what_is_broken_or_open_is_told(checker: ModuleType, exercise: str) -> None:
    assert checker.check(exercise, str(FOLDER / exercise / "solution.py")) is None
    assert TOLD[exercise] in checker.check(exercise, str(FOLDER / exercise / "broken.py"))
    assert "is still to be done" in checker.check(exercise, str(FOLDER / exercise / "task.py"))


def test_a_model_that_is_not_sharded_is_no_solution_of_the_third(checker: ModuleType) -> None:
    told = checker.check("fully_sharded", str(FOLDER / "data_parallel" / "solution.py"))
    assert "all numbers are right, but a rank holds 100% of the model" in told


@pytest.mark.thorough
def test_the_layer_is_graded_by_verify() -> None:
    folder = FOLDER / "tensor_parallel"
    assert all(grade.ok for grade in grade_layer(f"{folder}/solution.py:ParallelLinear"))
    assert {grade.first_wrong for grade in grade_layer(f"{folder}/broken.py:ParallelLinear")} == {"input gradient"}


def test_every_exercise_is_in_the_checker(checker: ModuleType) -> None:
    assert tuple(checker.EXERCISES) == EXERCISES
    assert sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__") == sorted(
        EXERCISES
    )
