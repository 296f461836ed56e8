"""Layouts of a model that reads pictures: what does not fit is refused in a sentence."""

from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import most_tensor_parallel, ranks_of, require_layout

VISION = {"image_size": 32, "patch": 8, "width": 24, "layers": 2, "heads": 3, "ffn_width": 48}


def job(vision: dict[str, Any], **sections: Any) -> Job:
    model = {"vocab_size": 64, "width": 32, "layers": 4, "heads": 4, "vision": VISION | vision}
    batch = {"sequence_length": 64, "global_batch": 8, "micro_batch": 1}
    return Job.model_validate({"model": model, "batch": batch, **sections})


@pytest.mark.parametrize(
    ("vision", "sections", "match"),
    [
        ({}, {"layout": {"tp": 2}}, r"layout.tp = 2 does not divide model.vision.heads = 3"),
        ({"heads": 2, "ffn_width": 49}, {"layout": {"tp": 2}}, r"model.vision.ffn_width = 49"),
        (
            {},
            {"layout": {"pp": 2, "schedule": "pipedream"}, "batch": {"micro_batch": 8, "global_batch": 8}},
            r'"pipedream" is not supported with model.vision',
        ),
        ({}, {"layout": {"dp_replicate": 2, "compress": "fp16"}}, r'layout.compress = "fp16" is not supported'),
        ({"images": 5}, {}, r"model.vision.images = 5 of 16 tokens each do not fit into batch.sequence_length = 64"),
        ({"train": ["projector"]}, {"precision": {"compute": "fp8"}}, r'"fp8" rounds products'),
    ],
)
def test_refused(vision: dict[str, Any], sections: dict[str, Any], match: str) -> None:
    if "batch" in sections:
        sections = sections | {"batch": {"sequence_length": 64} | sections["batch"]}
        asked = Job.model_validate(job(vision).model_dump() | sections)
    else:
        asked = job(vision, **sections)
    with pytest.raises(UserError, match=match):
        require_layout(asked, ranks_of(asked.layout))


def test_the_encoder_bounds_tensor_parallelism() -> None:
    assert most_tensor_parallel(job({}).model) == 1
    assert most_tensor_parallel(job({"heads": 4}).model) == 4


def test_pairs_of_answers_are_refused() -> None:
    with pytest.raises(ValueError, match=r'model.vision with data.format = "preferences" is not supported'):
        job({}, data={"format": "preferences"})


@pytest.mark.parametrize(
    ("audio", "layout", "match"),
    [
        ({"heads": 3}, {"tp": 2}, r"layout.tp = 2 does not divide model.audio.heads = 3"),
        ({"windows": 3}, {}, r"model.audio.windows = 3 of 25 tokens each do not fit into batch.sequence_length = 64"),
    ],
)
def test_an_encoder_of_sound_is_refused_likewise(audio: dict[str, Any], layout: dict[str, Any], match: str) -> None:
    sizes = {"seconds": 0.5, "width": 24, "layers": 1, "heads": 2, "ffn_width": 48}
    model = {"vocab_size": 64, "width": 32, "layers": 4, "heads": 4, "audio": sizes | audio}
    asked = Job.model_validate(
        {"model": model, "batch": {"sequence_length": 64, "global_batch": 8, "micro_batch": 1}, "layout": layout}
    )
    with pytest.raises(UserError, match=match):
        require_layout(asked, ranks_of(asked.layout))


def test_pictures_that_no_model_reads_are_refused() -> None:
    data = {"sources": ("a.jsonl",), "fields": {"image": {"kind": "image", "size": 32, "tokens": 16}}}
    alone = job({}).model_copy(update={"model": job({}).model.model_copy(update={"vision": None})})
    unread = Job.model_validate({**alone.model_dump(), "data": data})
    with pytest.raises(UserError, match=r"data\.fields has image, but model\.vision, which would read it, is not set"):
        require_layout(unread, ranks_of(unread.layout))
