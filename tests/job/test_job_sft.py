"""TRL's SFTConfig: the Trainer's arguments with packing, the dataset's columns and other defaults."""

from pathlib import Path

import pytest
from conversions import Settings, changed_leaves, refused, trainer

from meshwright.errors import UserError

SFT: Settings = {
    "max_length": 512, "packing": True, "packing_strategy": "bfd_split", "eval_packing": None, "padding_free": False,
    "dataset_text_field": "content", "dataset_num_proc": 4, "dataset_kwargs": {"skip_prepare_dataset": False},
    "completion_only_loss": None, "assistant_only_loss": True, "chat_template_path": "chat.jinja",
    "truncation_mode": "keep_start", "loss_type": "nll", "activation_offloading": True, "eos_token": None,
    "pad_token": None, "pad_to_multiple_of": 8, "shuffle_dataset": False, "learning_rate": 1e-5, "bf16": True,
    "model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "flash_attention_2"}, "logging_steps": 5,
    "gradient_checkpointing": True,
}  # fmt: skip


def test_every_field_of_an_sft_config_is_known(tmp_path: Path) -> None:
    found = trainer(tmp_path, SFT, ranks=1)
    expected = {
        "batch.sequence_length": 512,
        "data.packing": "best-fit",
        "data.mask_documents": True,
        "data.text_field": "content",
        "data.format": "conversations",
        "data.chat_template": "chat.jinja",
        "memory.recompute": "full",
        "memory.offload": ["activations"],
        "optimizer.lr": 1e-5,
        "log.every_steps": 5,
    }
    assert found.fields.items() >= expected.items()
    assert not any("SFTConfig" in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "expected", "note"),
    [
        ({"packing": False}, {"data.packing": "none"}, "examples of similar length share a batch"),
        ({"packing_strategy": "wrapped"}, {"data.packing": "concatenate"}, None),
        ({"packing_strategy": "bfd"}, {"data.packing": "best-fit"}, "is cut into pieces, not truncated"),
        ({"assistant_only_loss": False, "completion_only_loss": True}, {"data.format": "conversations"}, None),
        ({"assistant_only_loss": False}, {}, 'data.format = "text" learns every token'),
    ],
)
def test_packing_and_what_is_learned(tmp_path: Path, change: Settings, expected: Settings, note: str | None) -> None:
    found = trainer(tmp_path, SFT | change, ranks=1)
    assert found.fields.items() >= expected.items()
    assert note is None or any(note in said for said in found.notes)
    assert ("data.format" in found.fields) == (change.get("assistant_only_loss", True) or "data.format" in expected)


def test_its_defaults_are_its_own(tmp_path: Path) -> None:
    found = trainer(tmp_path, {"packing": True}, ranks=1)
    expected = {
        "batch.sequence_length": 1024,
        "optimizer.lr": 2e-5,
        "log.every_steps": 10,
        "memory.recompute": "full",
        "precision.compute": "bf16",
    }
    assert found.fields.items() >= expected.items()
    filled = "learning_rate = 2e-05, logging_steps = 10, gradient_checkpointing = true, max_length = 1024, bf16 = true"
    assert f"not given, so as SFTConfig of TRL 1 has it: {filled}" in found.notes
    older = trainer(tmp_path, {"packing": True, "max_seq_length": 2048, "fp16": True}, ranks=1).fields
    assert (older["batch.sequence_length"], older["precision.compute"]) == (2048, "fp16")
    plain = trainer(tmp_path, {"max_seq_length": 2048}, ranks=1).fields  # of a script, not of SFTConfig
    assert (plain["optimizer.lr"], plain["precision.compute"]) == (5e-5, "fp32")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"packing_strategy": "magic"}, 'packing_strategy = "magic" has no counterpart here; use bfd, bfd_split or'),
        ({"eval_packing": False}, "eval_packing = false has no counterpart here; evaluation packs as training does"),
        ({"truncation_mode": "keep_end"}, 'truncation_mode = "keep_end" has no counterpart here'),
        ({"loss_type": "dft"}, 'loss_type = "dft" has no counterpart here; the loss is cross-entropy'),
        ({"chat_template_path": "org/name"}, 'chat_template_path = "org/name" has no counterpart here; name a Jinja'),
        ({"model_init_kwargs": {"quantization_config": {"load_in_4bit": True}}}, "remove quantization_config"),
        ({"dataset_kwargs": {"skip_prepare_dataset": True}}, "dataset_kwargs = "),
        ({"eos_token": "<|im_end|>"}, 'eos_token = "<|im_end|>" has no counterpart here'),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(tmp_path: Path, change: Settings, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        trainer(tmp_path, SFT | change)
    (said,) = refused(caught.value)
    assert sentence in said


def test_no_value_whatever_is_more_than_a_mistake(tmp_path: Path) -> None:
    for changed in changed_leaves(SFT):
        try:
            trainer(tmp_path, changed)
        except UserError as error:
            assert ".json: " in str(error)
