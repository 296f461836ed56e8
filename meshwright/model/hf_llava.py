"""What LLaVA's files call the parts of a model that reads pictures."""

import re

LANGUAGE = "language_model."
"""Before the names of the decoder's own family."""
_TOWER = "vision_tower.vision_model."
_NAMES = {
    "patch": f"{_TOWER}embeddings.patch_embedding",
    "positions": f"{_TOWER}embeddings.position_embedding",
    "pre_norm": f"{_TOWER}pre_layrnorm",
    "attention_norm": f"{_TOWER}encoder.layers.{{}}.layer_norm1",
    "attention.q": f"{_TOWER}encoder.layers.{{}}.self_attn.q_proj",
    "attention.k": f"{_TOWER}encoder.layers.{{}}.self_attn.k_proj",
    "attention.v": f"{_TOWER}encoder.layers.{{}}.self_attn.v_proj",
    "attention.o": f"{_TOWER}encoder.layers.{{}}.self_attn.out_proj",
    "ffn_norm": f"{_TOWER}encoder.layers.{{}}.layer_norm2",
    "ffn.up": f"{_TOWER}encoder.layers.{{}}.mlp.fc1",
    "ffn.down": f"{_TOWER}encoder.layers.{{}}.mlp.fc2",
    "post_norm": f"{_TOWER}post_layernorm",
    "projector.up": "multi_modal_projector.linear_1",
    "projector.down": "multi_modal_projector.linear_2",
}
_OTHER_NAMES = (
    (re.compile(r"^(model\.)?vision_tower\.(vision_model\.)?"), _TOWER),
    (re.compile(r"^model\.multi_modal_projector\."), "multi_modal_projector."),
    (re.compile(r"^model\.language_model\."), f"{LANGUAGE}model."),
    (re.compile(r"^lm_head\."), f"{LANGUAGE}lm_head."),
)
"""Names in files and states of other versions of transformers, and those that published files have in their place."""


def encoder_tensor(parameter: str) -> str | None:
    """The stored name of a parameter of the encoder or the projector, by ours without `vision.`."""
    module, _, kind = parameter.rpartition(".")
    if module == "class_token":
        return f"{_TOWER}embeddings.class_embedding"
    layer = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
    return f"{_NAMES[module].format(layer)}.{kind}" if module in _NAMES else None


def published_name(stored: str) -> str:
    """The name that published files have for a tensor, whatever version of transformers wrote it."""
    for pattern, name in _OTHER_NAMES:
        if pattern.match(stored):
            return pattern.sub(name, stored)
    return stored
