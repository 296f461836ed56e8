"""What TRL's SFTConfig (1.x) adds to TrainingArguments: packing, the dataset's columns, other defaults."""

from typing import Any

from meshwright.job.convert import ANY, Conversion, Field, Passed, Rule

OWN = (
    "packing", "packing_strategy", "eval_packing", "padding_free", "dataset_text_field", "dataset_num_proc",
    "dataset_kwargs", "completion_only_loss", "assistant_only_loss", "chat_template_path", "truncation_mode",
    "activation_offloading", "model_init_kwargs",
)  # fmt: skip
"""Arguments that only an SFTConfig has."""
LENGTHS = ("max_seq_length", "max_length")
DEFAULTS: dict[str, Any] = {"learning_rate": 2e-5, "logging_steps": 10, "gradient_checkpointing": True}
"""Where they differ from TrainingArguments'; also bf16 unless fp16, and sequences of 1024 tokens."""
RULES: dict[str, Rule] = {
    "dataset_text_field": Field("data.text_field"),
    "dataset_kwargs": Passed([None, {}, {"skip_prepare_dataset": False}], "prepare the data with meshwright data"),
    "truncation_mode": Passed(["keep_start"], "what is too long loses its end here: write keep_start"),
    "loss_type": Passed([None, "nll", "chunked_nll"], "the loss is cross-entropy here, or model.loss of your own"),
    "eos_token": Passed([None, "<EOS_TOKEN>"], "the tokenizer's own is used: remove it"),
    # padding, speed of preparing, and the order of a dataset that is shuffled in any case
    **dict.fromkeys(
        ("pad_token", "pad_to_multiple_of", "padding_free", "dataset_num_proc", "dataset_batch_size",
         "shuffle_dataset", "num_of_sequences", "chars_per_token"),
        Passed(ANY),
    ),
}  # fmt: skip
_INIT = ("dtype", "torch_dtype", "attn_implementation", "use_cache", "device_map")
"""Of model_init_kwargs, what only says how the weights are held and attention is computed."""


def is_sft(settings: dict[str, Any]) -> bool:
    """Whether arguments are an SFTConfig's."""
    return any(name in settings for name in OWN)


def fill_sft_defaults(conversion: Conversion) -> None:
    """Give arguments that are not given the defaults of an SFTConfig, and say which."""
    settings = conversion.settings
    missing = {name: value for name, value in DEFAULTS.items() if name not in settings}
    if not any(name in settings for name in LENGTHS):
        missing["max_length"] = 1024
    if settings.get("bf16") is None and not settings.get("fp16"):
        missing["bf16"] = True
    settings.update(missing)
    if missing:
        given = ", ".join(f"{name} = {str(value).lower()}" for name, value in missing.items())
        conversion.notes.append(f"not given, so as SFTConfig of TRL 1 has it: {given}")


def convert_sft(conversion: Conversion) -> None:
    """packing, what counts in the loss, chat_template_path, activation_offloading → data, memory."""
    _packing(conversion)
    answers = [conversion.switch(name) for name in ("assistant_only_loss", "completion_only_loss")]
    if any(answers):
        conversion.fields["data.format"] = "conversations"
    else:
        conversion.notes.append(
            'data.format = "text" learns every token of data.text_field; conversations and prompts with completions '
            'need data.format = "conversations", which learns the answers'
        )
    template = conversion.word("chat_template_path")
    if template is not None and template.endswith((".jinja", ".jinja2", ".j2")):
        conversion.fields["data.chat_template"] = template
    elif template is not None:
        conversion.refuse("chat_template_path", "name a Jinja file, or take model.init_from's by removing it")
    if conversion.switch("activation_offloading"):
        conversion.fields["memory.offload"] = [*conversion.fields.get("memory.offload", []), "activations"]
    kwargs = conversion.table("model_init_kwargs")
    if other := sorted(name for name, value in kwargs.items() if name not in _INIT and value):
        conversion.refuse("model_init_kwargs", f"remove {', '.join(other)}")


def _packing(conversion: Conversion) -> None:
    """packing and packing_strategy → data.packing, data.mask_documents."""
    packing, strategy = conversion.switch("packing"), conversion.word("packing_strategy", "bfd")
    if conversion.take("eval_packing") not in (None, packing):
        conversion.refuse("eval_packing", "evaluation packs as training does: write the same as packing")
    if not packing:
        conversion.fields["data.packing"] = "none"
        conversion.notes.append("examples of similar length share a batch; their order is another")
    elif strategy in ("bfd", "bfd_split", "bfd-requeue", "ffd"):
        conversion.fields |= {"data.packing": "best-fit", "data.mask_documents": True}
        if strategy in ("bfd", "ffd"):
            conversion.notes.append("an example longer than batch.sequence_length is cut into pieces, not truncated")
    elif strategy == "wrapped":
        conversion.fields["data.packing"] = "concatenate"
    else:
        conversion.refuse("packing_strategy", "use bfd, bfd_split or wrapped")
