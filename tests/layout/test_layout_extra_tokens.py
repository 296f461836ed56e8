"""What cannot be combined with extra tokens is refused in one sentence."""

from typing import Any

import pytest
from pydantic import ValidationError

from meshwright.errors import UserError
from meshwright.job import Job, Model
from meshwright.layout import require_layout


def job(**sections: Any) -> Job:
    model = {"width": 48, "heads": 6, "layers": 4, "extra_tokens": 1}
    return Job.model_validate({"model": model, "batch": {"global_batch": 8, "micro_batch": 8}} | sections)


def test_a_pipeline_of_stages_that_update_by_themselves() -> None:
    asked = job(layout={"pp": 2, "schedule": "pipedream"})
    with pytest.raises(UserError, match=r'"pipedream" .* model\.extra_tokens = 1 needs; set model\.extra_tokens = 0'):
        require_layout(asked, 2)
    require_layout(job(layout={"pp": 2}, batch={"global_batch": 8, "micro_batch": 2}), 2)


def test_a_budget_that_does_not_know_what_they_keep() -> None:
    with pytest.raises(UserError, match=r"budget_gib.* model\.extra_tokens = 1 keep; set memory\.recompute"):
        require_layout(job(memory={"recompute": {"budget_gib": 4.0}}), 1)


def test_a_model_of_one_s_own() -> None:
    with pytest.raises(ValidationError, match=r"model\.extra_tokens = 1 .* model\.file = own\.py"):
        Model(file="own.py", extra_tokens=1)
