"""`import meshwright` is cheap, and a package that is also a function is both, whatever was imported first."""

import subprocess
import sys

import pytest

import meshwright


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_import_loads_nothing_but_itself() -> None:
    done = python("import meshwright, sys; print(*{'torch', 'numpy', 'pydantic', 'rich'}.intersection(sys.modules))")
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_jobs_and_plans_need_no_torch() -> None:
    code = (
        "import meshwright, sys; meshwright.plan(meshwright.load_job('gpt2'), '8xh100'); meshwright.Callback, "
        "meshwright.Run, meshwright.Checkpoint, meshwright.register_optimizer; sys.exit('torch' in sys.modules)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    "imports",
    [
        "import meshwright",
        "import meshwright.plan, meshwright",
        "from meshwright.plan import predict; import meshwright",
        "import meshwright; meshwright.plan; import meshwright.plan",
        "import meshwright.api, meshwright",
        "import meshwright; from meshwright import plan; assert plan is meshwright.plan",
    ],
)
def test_a_package_is_also_a_function_in_any_order_of_imports(imports: str) -> None:
    code = (
        f"{imports}; found = meshwright.plan('gpt2', '8xh100', top=1); from meshwright.plan import predict; "
        "assert found.best.step_s == predict(found.best.job, found.cluster).step_s and callable(meshwright.plan.search)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_the_others_are_both_too() -> None:
    from meshwright.data.loader import Loader
    from meshwright.train import Trainer
    from meshwright.verify import check

    assert all(map(callable, (meshwright.train, meshwright.verify, meshwright.data.loader)))
    assert all(map(callable, (Loader, Trainer, check)))


def test_what_there_is_can_be_listed_and_nothing_else_be_had() -> None:
    assert {"load_job", "plan", "verify", "train", "bench", "open_run", "Checkpoint", "data"} <= set(dir(meshwright))
    assert all(getattr(meshwright, name) is not None for name in meshwright.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        meshwright.trian  # noqa: B018


def test_type_checkers_see_every_name() -> None:
    from pathlib import Path

    stub = Path(meshwright.__file__).with_name("__init__.pyi").read_text(encoding="utf-8")
    assert all(f" as {name}\n" in stub for name in meshwright.__all__ if name != "__version__")
