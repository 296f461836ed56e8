"""What Whisper's files call the parts of its encoder."""

POSITIONS = "embed_positions.weight"
"""The sinusoids, which files contain and nothing here reads as weights."""
PREFIXES = ("model.encoder.", "encoder.", "")
"""Before the encoder's names: in a whole model, in one without its head, and in an encoder's own file."""
_NAMES = {
    "first": "conv1",
    "second": "conv2",
    "attention_norm": "layers.{}.self_attn_layer_norm",
    "attention.q": "layers.{}.self_attn.q_proj",
    "attention.k": "layers.{}.self_attn.k_proj",
    "attention.v": "layers.{}.self_attn.v_proj",
    "attention.o": "layers.{}.self_attn.out_proj",
    "ffn_norm": "layers.{}.final_layer_norm",
    "ffn.up": "layers.{}.fc1",
    "ffn.down": "layers.{}.fc2",
    "post_norm": "layer_norm",
}


def whisper_tensor(parameter: str) -> str:
    """The stored name of a parameter of the encoder, without a prefix, by ours without `audio.`."""
    module, _, kind = parameter.rpartition(".")
    layer = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
    return f"{_NAMES[module].format(layer)}.{kind}"
