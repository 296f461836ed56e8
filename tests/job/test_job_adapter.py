"""[model.adapter]: what is refused, and how it is said."""

from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.errors import UserError
from meshwright.job import Job, load_job
from meshwright.layout import require_layout

SMALL = Path(__file__).parents[1] / "small.toml"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.adapter.rank=0"], "model.adapter.rank = 0"),
        (["model.adapter.dropout=1.0"], "model.adapter.dropout = 1.0"),
        (["model.adapter.targets=['q_proj']"], "use all or some of attention: q, k, v, o; ffn: gate, up, down"),
        (["model.adapter.targets=[]"], "model.adapter.targets"),
        (["model.adapter.ranks=4"], "model.adapter.ranks"),
        (["model.adapter.rank=4", "model.extra_tokens=1"], "set model.extra_tokens = 0"),
        (["model.adapter.rank=4", "model.file=mine.py"], "model.file = mine.py builds its own"),
        (["model.adapter.init_from=nowhere"], "has no adapter_config.json"),
    ],
)
def test_what_cannot_be_is_refused_by_name(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        load_job(str(SMALL), overrides)
    assert words in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"precision": {"compute": "fp8"}}, 'set precision.compute = "bf16"'),
        ({"layout": {"pp": 2, "schedule": "pipedream"}, "batch": {"micro_batch": 8, "global_batch": 8}}, "1f1b"),
    ],
)
def test_layouts_that_do_not_train_adapters_are_refused(sections: dict[str, Any], words: str) -> None:
    job = Job.model_validate({"model": {"adapter": {}}} | sections)
    with pytest.raises(UserError, match=words):
        require_layout(job, job.layout.pp)


@pytest.mark.parametrize("command", ["train", "submit --dry-run", "submit --on kubernetes"])
def test_adapters_of_random_weights_are_refused_before_a_run(cli: Any, command: str) -> None:
    refused = cli(*command.split(), "demo", "--set", "model.adapter.rank=4", "--set", "run.folder=run")
    assert refused.code == 2 and not Path("run").exists()
    assert "model.adapter with rank = 4" in refused.err and "set model.init_from to" in refused.err


def test_the_api_refuses_adapters_of_random_weights_and_the_planner_does_not(cli: Any) -> None:
    job = load_job("demo", ["model.adapter.rank=4", "run.folder=run"]).job
    with pytest.raises(UserError, match=r"set model\.init_from to"):
        meshwright.train(job)
    assert cli("plan", "--check", "demo", "--set", "model.adapter.rank=4", "--cluster", "1xh100").code == 0
