"""Quantised base weights on releases of torch that cannot share them between ranks."""

import pytest
import torch

from meshwright.errors import UserError
from meshwright.parallel import World, apply, build, quantised
from meshwright.verify import check, load_matrix


@pytest.mark.thorough
def test_a_torch_that_cannot_shard_integers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "TORCH_SHARDS_INTEGERS", False)
    [job] = [line.job for line in load_matrix() if line.name == "llama, nf4 · dp_shard 2, zero 3, some projections"]
    with pytest.raises(UserError, match=r'base = "nf4" with layout.zero = 3 .* shards integers.*; set layout.zero = 2'):
        check(job)
    assert check(job.model_copy(update={"layout": job.layout.model_copy(update={"zero": 2})})).ok


def test_a_job_without_quantised_weights_builds_no_second_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the sizes of what is quantised, every parameter's would be made."""
    monkeypatch.delattr(quantised, "packed_weights")
    job = next(line.job for line in load_matrix() if line.name == "llama · recompute selective")
    build(job, World(torch.device("cpu")))
