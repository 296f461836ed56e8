"""The fields of samples with pictures, film and sound: what a job may say of them."""

import pytest

from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.job.data import Data
from meshwright.job.fields import item_plan

IMAGE = {"kind": "image", "size": 32, "tokens": 16}


def data_of(**changes) -> Data:
    return Data(**{"sources": ("a.tar",), "fields": {"image": IMAGE}, **changes})


def test_samples_stay_whole_by_default():
    data = data_of()
    assert (data.packing, data.mask_documents) == ("best-fit", True)
    assert (Data().packing, Data().mask_documents) == ("concatenate", False)


def test_a_sequence_has_as_many_slots_as_could_fill_it():
    assert item_plan(Data(), 64) is None
    plan = item_plan(data_of(), 100)
    assert (plan.shape, plan.tokens, plan.slots) == ((3, 32, 32), 16, 6)
    assert item_plan(data_of(items_per_sequence=2), 100).slots == 2
    sound = {"kind": "audio", "tokens": 5, "mels": 40, "seconds": 1.5}
    assert item_plan(data_of(fields={"sound": sound}), 100).shape == (40, 150)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fields": {"Image": IMAGE}}, "a field's name is its placeholder"),
        ({"fields": {"image": {"kind": "image", "tokens": 4}}}, r"data\.fields\.image\.size is not set"),
        ({"fields": {"image": {"kind": "image", "size": 8}}}, r"data\.fields\.image\.tokens is not set"),
        (
            {"fields": {"image": IMAGE, "film": {**IMAGE, "kind": "video", "size": 64}}},
            "give all fields of a job the same",
        ),
        ({"stream": True, "packing": "concatenate"}, r"does not support data\.stream = true"),
        ({"packing": "concatenate"}, "would cut items apart"),
        ({"format": "preferences"}, r'does not support data\.format = "preferences"'),
        ({"mask_documents": False}, r"does not support data\.mask_documents = false"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        data_of(**changes)


def test_errors_name_the_field_of_a_field(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text('[data]\nsources = ["a.tar"]\n[data.fields.image]\nkind = "image"\nsize = 8\ntokens = 1\n')
    assert load_job(str(job)).job.data.fields["image"].size == 8
    with pytest.raises(UserError, match=r"data\.fields\.image\.size = 0 is not allowed"):
        load_job(str(job), ["data.fields.image.size=0"])
    with pytest.raises(UserError, match=r"data\.fields\.image\.sise is not a known setting"):
        load_job(str(job), ["data.fields.image.sise=3"])


def test_an_encoder_is_code(tmp_path):
    from meshwright.job.trust import code_of

    job = tmp_path / "job.toml"
    job.write_text('[data]\nsources = ["a.tar"]\nencoder = "own.py:Encoder"\n[data.fields.image]\nkind = "image"\n')
    loaded = load_job(str(job), ["data.fields.image.size=8", "data.fields.image.tokens=1"])
    assert code_of(loaded.job) == {"data.encoder": 'data.encoder = "own.py:Encoder"'}
