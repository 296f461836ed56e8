"""Things of a user's own by name: in jobs, plans, checkpoints and other layouts; and those of installed packages."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import own_things
import pytest
import torch
from api_fixtures import package, registered  # noqa: F401

import meshwright
from meshwright.errors import UserError
from meshwright.registries import OPTIMIZERS, own_state_bytes


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_names_are_plain_and_not_taken() -> None:
    for name, why in (("adamw", "is built in"), ("My Optimizer", "is no name of lower-case letters")):
        with pytest.raises(UserError, match=why):
            meshwright.register_optimizer(name)
    with pytest.raises(UserError, match='the loss "three" cannot be called'):
        meshwright.register_loss("three")(3)


def test_an_optimizer_declares_what_others_must_know() -> None:
    class Silent(torch.optim.SGD):
        pass

    with pytest.raises(UserError, match="whether it updates every entry by itself; set elementwise = True"):
        meshwright.register_optimizer("silent")(Silent)
    Silent.elementwise = True
    with pytest.raises(UserError, match="does not say what it keeps for every entry; set states"):
        meshwright.register_optimizer("silent")(Silent)
    assert "silent" not in OPTIMIZERS.names()


def test_the_planner_counts_the_states_of_one_s_own(own: None) -> None:
    held = {}
    for name in ("adamw", "nesterov", "normalised"):
        job = meshwright.load_job("llama-3.2-1b", set={"optimizer.name": name})
        held[name] = meshwright.plan(job, "1xh100", top=1).best.prediction.fullest.terms["optimizer states"]
    assert held["adamw"] == 2 * held["nesterov"] == 2 * held["normalised"] > 0 and own_state_bytes("whole") == 0
    own_things.Whole.state_bytes = 2.5
    try:
        assert own_state_bytes("whole") == 2.5
    finally:
        del own_things.Whole.state_bytes


@pytest.mark.thorough
def test_its_states_are_saved_and_resumed_in_another_layout(own: None, tiny_job: Path) -> None:
    names = {"optimizer.name": "nesterov", "optimizer.lr": 1e-1, "checkpoint.every_steps": 5}
    job = meshwright.load_job(tiny_job, set=names)
    whole = meshwright.train(meshwright.load_job(job, set={"run.folder": "whole"}))
    sharded = meshwright.load_job(job, set={"layout.dp_shard": 2})
    meshwright.train(sharded, nproc=2, callbacks=[lambda row: row["step"] == 4])
    saved = meshwright.Checkpoint("run")
    assert saved.shape("optimizer/embed.weight/velocity") == saved.shape("model/embed.weight")
    resumed = meshwright.train(job, resume=True)
    assert len(resumed.losses) == 10 and resumed.losses == pytest.approx(whole.losses, rel=1e-4)


@pytest.mark.thorough
def test_states_that_it_did_not_declare_are_refused(own: None, tiny_job: Path) -> None:
    with pytest.raises(UserError, match=r'Undeclared keeps "velocity" for every entry, and its states = \(\)'):
        meshwright.train(meshwright.load_job(tiny_job, set={"optimizer.name": "undeclared"}))

    class Counting(own_things.Whole):
        def step(self, closure: None = None) -> None:
            super().step()
            self.state[self.param_groups[0]["params"][0]]["steps"] = 3

    meshwright.register_optimizer("counting")(Counting)
    with pytest.raises(UserError, match='keeps "steps" as int, and a checkpoint holds tensors'):
        meshwright.train(meshwright.load_job(tiny_job, set={"optimizer.name": "counting", "run.folder": "other"}))


@pytest.mark.thorough
def test_torch_s_own_optimizers_become_ours_by_declaring(own: None, tiny_job: Path) -> None:
    class NAdam(torch.optim.NAdam):
        elementwise = True
        states = ("exp_avg", "exp_avg_sq")

    meshwright.register_optimizer("nadam")(NAdam)
    job = meshwright.load_job(tiny_job, set={"optimizer.name": "nadam", "optimizer.settings": {"momentum_decay": 0.01}})
    assert meshwright.verify(meshwright.load_job(job, set={"layout.dp_shard": 2}), steps=2).equal
    assert meshwright.train(meshwright.load_job(job, set={"run.steps": 2})).checkpoint.step == 2


def test_a_loss_and_a_schedule_are_used(own: None, tiny_job: Path) -> None:
    few = meshwright.load_job(tiny_job, set={"run.steps": 3, "schedule.warmup_steps": 1})
    plain = meshwright.train(meshwright.load_job(few, set={"run.folder": "plain"}))
    given = {"model.loss": "z-loss", "schedule.name": "inverse-root", "schedule.settings": {"power": 1.0}}
    run = meshwright.train(meshwright.load_job(few, set=given))
    rates = [row["lr"] / 1e-2 for row in run.rows]
    assert rates == pytest.approx([1.0, 1 / 2, 1 / 3])
    normaliser = torch.tensor(float(512)).log()  # of logits that are all but equal
    assert run.losses[0] - plain.losses[0] == pytest.approx(1e-2 * float(normaliser) ** 2, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"optimizer.settings": {"rho": 3.0}},
            r"optimizer.settings = \{'rho': 3.0\} cannot be given to optimizer.name",
        ),
        ({"precision.optimizer_states": "bf16"}, 'precision.optimizer_states = "bf16" is a format of built-in'),
        ({"schedule.name": "falling"}, 'schedule.name = "falling" gives nan for step 1, and the learning rate is'),
        ({"model.loss": "mean"}, r'model.loss = "mean" gives a tensor of shape \[\] for \d+ tokens; return one number'),
    ],
)
def test_what_does_not_work_is_named(own: None, tiny_job: Path, fields: dict[str, Any], sentence: str) -> None:
    meshwright.register_schedule("falling")(lambda job, step: float("nan"))
    meshwright.register_loss("mean")(lambda logits, labels: torch.nn.functional.cross_entropy(logits, labels))
    given = {"optimizer.name": "nesterov", "evaluation.every_steps": 0, **fields}
    with pytest.raises(UserError, match=sentence):
        meshwright.train(meshwright.load_job(tiny_job, set=given))


@pytest.mark.thorough
def test_an_installed_package_is_found_by_the_command(installed: Path, tiny_job: Path, warm_command: Path) -> None:
    """In a new process, which registers nothing itself."""

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [warm_command / "meshwright", *words],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )

    own: tuple[str, ...] = (
        "--set",
        "optimizer.name=nesterov",
        "--set",
        "schedule.name=inverse-root",
        "--set",
        "log.sinks=['lines']",
    )
    own += ("--set", "model.loss=z-loss", "--set", "data.sources=['counted:80']", "--set", "run.steps=3")
    done = command("train", str(tiny_job), *own, "--nproc", "2", "--set", "layout.dp_shard=2")
    assert done.returncode == 0, done.stderr
    assert (tiny_job.parent / "run" / "lines.txt").read_text().endswith("closed True\n")
    refused = command("train", str(tiny_job), "--set", "optimizer.name=broken", "--set", "run.folder=other")
    assert refused.returncode == 2 and "whose package cannot be imported (AttributeError: " in refused.stderr
    explained = command("job", "explain", str(tiny_job), "--set", "optimizer.name=nestrov")
    assert explained.returncode == 2
    assert "choose one of adamw, sgd, adafactor, lion, muon, broken, nesterov, or install" in explained.stderr


def test_a_job_imports_nothing_until_it_runs(installed: Path, tiny_job: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r}); import meshwright; "
        f"job = meshwright.load_job({str(tiny_job)!r}, set={{'optimizer.name': 'nesterov'}}); "
        "sys.exit('own_things' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
