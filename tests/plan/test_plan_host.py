"""Steps that wait for their host: small jobs, slow hosts, and cards that must not differ by their hosts."""

import json
from pathlib import Path
from typing import Any

import pytest
from plan_jobs import llama

from meshwright.hardware import Profile, profile_of, write_profile
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.plan import Prediction, predict

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WAITS = ("forward waits for the host", "backward waits for the host", "host")
SMALL = {"vocab_size": 1024, "width": 256, "layers": 4, "heads": 4, "ffn_width": 768, "max_sequence_length": 512}


def small(**sections: dict[str, Any]) -> Job:
    batch = {"sequence_length": 128, "global_batch": 1, "micro_batch": 1}
    given: dict[str, Any] = {"model": SMALL, "batch": batch, "precision": {"compute": "bf16"}}
    return Job.model_validate(given | sections)


def waited(prediction: Prediction) -> float:
    return sum(prediction.phases[name] for name in WAITS)


def with_launches(profiles: Path, launch_s: float) -> Cluster:
    """An H200 beside a host that takes so long for a launch."""
    shipped = profile_of("h200")
    assert isinstance(shipped, Profile)
    write_profile(shipped.model_copy(update={"launch_s": launch_s}), profiles / "h200.json")
    return Cluster(gpu="h200")


def test_small_steps_are_near_those_that_were_measured() -> None:
    """Two jobs whose device had next to nothing to do; hosts of the same kind differed by an eighth."""
    measured = {
        row["setting"]: row["step_s"]
        for row in json.loads((RESULTS / "2026-11-16-utilisation-h200.json").read_text())["results"]
    }
    few = {"sequence_length": 256, "global_batch": 1, "micro_batch": 1}
    jobs = {
        "4M parameters, 1 × 128 tokens, eager": small(),
        "1B, 1 × 256 tokens, eager": llama("llama-3.2-1b", batch=few, run={"compile": False}),
    }
    for name, job in jobs.items():
        prediction = predict(job, Cluster(gpu="h200"))
        assert prediction.step_s == pytest.approx(measured[name], rel=0.10), name
        assert waited(prediction) > 0.5 * prediction.step_s
        assert sum(prediction.phases.values()) == pytest.approx(prediction.step_s)


def test_a_slow_host_slows_small_jobs_and_no_others(profiles: Path) -> None:
    large = llama("llama-3.2-1b", batch={"sequence_length": 4096, "global_batch": 8, "micro_batch": 8})
    fast, slow = (
        [predict(job, with_launches(profiles, launch_s)).step_s for job in (small(), large)]
        for launch_s in (10e-6, 20e-6)
    )
    assert slow[0] == pytest.approx(2 * fast[0], rel=0.02)
    assert slow[1] == pytest.approx(fast[1], rel=0.001)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_cards_do_not_differ_by_their_hosts(compiled: bool, recompute: str) -> None:
    """A calibrated card next to those without a profile: launch-bound jobs take as long on all of them."""
    for model in (SMALL, SMALL | {"norm": "layernorm", "activation": "gelu", "positions": "learned"}):
        job = small(model=model, run={"compile": compiled}, memory={"recompute": recompute})
        steps = {gpu: predict(job, Cluster(gpu=gpu)).step_s for gpu in ("h200", "h100", "a100-80gb", "b200")}
        assert all(one == pytest.approx(steps["h200"], rel=0.02) for one in steps.values()), steps
        assert steps["h100"] >= 0.999 * steps["h200"]


def test_compiled_blocks_launch_less() -> None:
    eager, compiled = (predict(small(run={"compile": one}), Cluster(gpu="h200")).step_s for one in (False, True))
    assert compiled < 0.8 * eager


def test_an_update_hides_the_launches_after_it(profiles: Path) -> None:
    """The loss is read before the update: while the device updates 1B parameters, the host launches the next step."""
    few = {"sequence_length": 256, "global_batch": 1, "micro_batch": 1}
    job = llama("llama-3.2-1b", batch=few, run={"compile": False})
    prediction = predict(job, with_launches(profiles, 9e-6))
    update = prediction.phases["optimizer"]
    assert update > 0.005
    frozen = job.model_copy(update={"memory": job.memory.model_copy(update={"offload": ("optimizer",)})})
    without = predict(frozen, with_launches(profiles, 9e-6))
    alone = without.step_s - without.phases["update on the host"] - without.phases["waiting for transfers to the host"]
    assert prediction.step_s - alone < 0.5 * update


def test_every_further_micro_batch_waits_the_same() -> None:
    def step_s(times: int) -> float:
        batch = {"sequence_length": 128, "global_batch": times, "micro_batch": 1}
        return predict(small(batch=batch), Cluster(gpu="h200")).step_s

    each = step_s(3) - step_s(2)
    assert step_s(40) == pytest.approx(step_s(3) + 37 * each, rel=1e-6)
