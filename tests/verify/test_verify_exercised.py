"""A proof that compares nothing but rounding is refused, and what is zero by mathematics raises no alarm."""

from typing import Any

import pytest
from verify_jobs import matrix_jobs

from meshwright.job import Job
from meshwright.verify import check
from meshwright.verify import documents as texts
from meshwright.verify.check import reference
from meshwright.verify.compare import zero_gradients
from meshwright.verify.vacuous import Vacuous


def job_of(line: str, **changes: dict[str, Any]) -> Job:
    job = matrix_jobs()[line].model_dump()
    for section, fields in changes.items():
        job[section] = {**job[section], **fields}
    return Job.model_validate(job)


@pytest.mark.thorough
def test_the_sign_of_rounding_is_no_mistake() -> None:
    """GPT-2's key bias has no gradient, and Lion steps by the sign of what rounding leaves there."""
    job = job_of("gpt2 · tp 2", optimizer={"name": "lion"})
    assert {name.rpartition(".")[0][-1] for name in zero_gradients(reference(job, "float64"))} == {"k"}
    verdict = check(job)
    assert verdict.ok, verdict.first_wrong
    unjudged = {row.name for row in verdict.rows if row.ok is None}
    assert unjudged and all(name.endswith("attention.k.bias") for name in unjudged)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float64", "bf16"])
def test_a_router_without_a_gradient_is_vacuous_not_unequal(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single score divided by itself is 1; what Lion makes of the router's rounding differs in every layout."""
    monkeypatch.setattr("meshwright.layout.experts.require_router", lambda job: None)  # which refuses this cause of it
    line = "moe · dp_shard 2, ep 2"
    experts = matrix_jobs()[line].model.experts
    assert experts is not None
    alone = {"experts": experts.model_dump() | {"top_k": 1, "normalised": True, "balance_loss": 0.0, "z_loss": 0.0}}
    with pytest.raises(Vacuous, match=r"only rounding errors arrive as the gradient of layers\.0\.moe\.router"):
        check(job_of(line, model=alone, optimizer={"name": "lion"}, run={"steps": 1}), dtype)


@pytest.mark.thorough
def test_a_check_that_leaves_attention_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pairs(texts.UnequalDocuments):
        """Documents of two tokens: one label each, of a token that sees itself alone."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._starts = texts.np.arange(0, len(self), 2)

    monkeypatch.setattr(texts, "UnequalDocuments", Pairs)
    job = job_of("llama · tp 2", data={"packing": "none"}, run={"seed": 99})
    with pytest.raises(
        Vacuous, match=r"only rounding errors arrive as the gradient of layers\.0\.attention\.k\.weight"
    ):
        check(job)


def test_a_capacity_that_drops_nothing_is_refused() -> None:
    """Every expert may take whole sequences."""
    experts = matrix_jobs()["moe-capacity · dp_shard 2, ep 2"].model.experts
    assert experts is not None
    roomy = {"experts": experts.model_dump() | {"capacity": 3.0}}
    with pytest.raises(Vacuous, match=r"model\.experts\.capacity = 3: no token was dropped .*; lower it"):
        check(job_of("moe-capacity · dp_shard 2, ep 2", model=roomy, run={"steps": 1}))


@pytest.mark.parametrize("seed", range(0, 400, 40))
def test_documents_alone_in_their_sequences_exercise_attention_at_every_seed(seed: int) -> None:
    job = job_of("llama · tp 2", data={"packing": "none"}, batch={"global_batch": 2}, run={"seed": seed, "steps": 1})
    assert not zero_gradients(reference(job, "float64"))
