"""Logits and every gradient equal transformers' own models after loading their weights through the name maps."""

from typing import Any

import pytest
import torch
from model_shapes import preset

from meshwright.errors import UserError
from meshwright.job import model_from_hf_config, model_to_hf_config
from meshwright.job.model import Model
from meshwright.model import Decoder, initialise, load_hf_state, preference_sizes, to_hf_state

transformers = pytest.importorskip("transformers")

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 16}
EXPERTS = LLAMA | {"intermediate_size": 40, "num_experts_per_tok": 2, "pad_token_id": None, "eos_token_id": None}
MIXTRAL = EXPERTS | {"model_type": "mixtral", "num_local_experts": 4}
QWEN3 = EXPERTS | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 24}
LATENT = EXPERTS | {
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama-scaled-tied": ("llama", LLAMA | {"rope_parameters": SCALED, "tie_word_embeddings": True}),
    "llama-biases": ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", LLAMA | {"sliding_window": 7, "head_dim": 8}),
    "qwen2": ("qwen2", LLAMA | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 12}),
    "qwen3-yarn": ("qwen3", LLAMA | {"head_dim": 12, "rope_parameters": YARN}),
    "gpt2": (
        "gpt2",
        {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, "attn_implementation": "eager"}
        | {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "mixtral": ("mixtral", EXPERTS | {"num_local_experts": 4, "sliding_window": 7}),
    "olmoe": ("olmoe", EXPERTS | {"num_experts": 6, "num_experts_per_tok": 3}),
    "qwen3-moe": (
        "qwen3_moe",
        EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 12, "norm_topk_prob": True}
        | {"mlp_only_layers": [0]},
    ),
    "gpt-oss": (
        "gpt_oss",
        EXPERTS | {"num_local_experts": 4, "head_dim": 8, "sliding_window": 7, "swiglu_limit": 0.5}
        | {"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 1.0, "truncate": False}},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
        | {"n_shared_experts": 2, "routed_scaling_factor": 3.0},
    ),
    "deepseek-v2-lite": ("deepseek_v2", LATENT | {"q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek-v3": (
        "deepseek_v3",
        LATENT | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 1}
        | {"rope_parameters": YARN | {"beta_fast": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
}  # fmt: skip


def theirs_and_ours(case: str) -> tuple[Any, Decoder]:
    family, options = FAMILIES[case]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **options)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in theirs.parameters():  # away from zero biases and unit norms, which would hide a mistake
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.05 * torch.randn_like(buffer))
    ours = Decoder(Model(**model_from_hf_config(theirs.config.to_dict())))
    load_hf_state(ours, theirs.state_dict())
    return theirs, ours


def relative(ours: torch.Tensor, theirs: torch.Tensor, floor: float = 0.0) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=floor)).item()


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_loss_and_gradients_equal_theirs(case: str) -> None:
    theirs, ours = theirs_and_ours(case)
    tokens = torch.randint(0, 97, (2, 33))
    x, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, :5] = -100
    logits = theirs(x).logits
    assert relative(ours(x), logits) <= 1e-5

    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    our_loss = ours(x, labels, int((labels != -100).sum()))
    our_loss.backward()
    assert relative(our_loss, loss) <= 1e-5
    gradients = Decoder(ours.shape)
    load_hf_state(gradients, theirs.state_dict() | {name: p.grad for name, p in theirs.named_parameters()})
    largest = max(gradient.abs().max().item() for gradient in gradients.parameters())
    for name, parameter in ours.named_parameters():
        # Without rotation a key's bias shifts all of a query's scores alike: its gradient is zero but for rounding.
        zero = ours.shape.positions == "learned" and name.endswith("attention.k.bias")
        floor = largest if zero else 1e-6 * largest
        assert relative(parameter.grad, gradients.get_parameter(name), floor) <= 1e-5, name


@pytest.mark.parametrize("case", FAMILIES)
def test_round_trips_are_bit_equal(case: str) -> None:
    theirs, ours = theirs_and_ours(case)
    exported = to_hf_state(ours)
    state = theirs.state_dict()
    if ours.shape.experts is None or case == "gpt-oss":  # in others all experts are one tensor in memory, not in files
        assert set(state) - set(exported) <= ({"lm_head.weight"} if ours.shape.tied else set())
        assert set(exported) <= set(state)
    for name in exported.keys() & state.keys():
        assert torch.equal(exported[name], state[name]), name
    rebuilt = transformers.AutoConfig.for_model(**model_to_hf_config(ours.shape))
    assert Model(**model_from_hf_config(rebuilt.to_dict())) == ours.shape
    again = Decoder(ours.shape)
    initialise(again, 1)
    load_hf_state(again, exported)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name
    assert all(torch.equal(a, b) for a, b in zip(again.buffers(), ours.buffers(), strict=True))


def test_preferences_change_who_is_chosen_and_are_read() -> None:
    _, ours = theirs_and_ours("deepseek-v3")
    tokens = torch.randint(0, 97, (1, 16))
    before = ours(tokens)
    for name in preference_sizes(ours.shape):
        assert ours.get_buffer(name).abs().max() > 0
        ours.get_buffer(name).zero_()
    assert relative(ours(tokens), before) > 1e-3


def test_layers_that_predict_further_tokens_are_ignored() -> None:
    theirs, ours = theirs_and_ours("deepseek-v3")
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(2), "model.layers.3.mlp.gate.weight": torch.zeros(2)}
    load_hf_state(ours, theirs.state_dict() | extra)
    with pytest.raises(UserError, match=r"contain model\.layers\.2\.eh_proj"):
        load_hf_state(ours, theirs.state_dict() | {"model.layers.2.eh_proj.weight": torch.zeros(2)})


def test_published_gpt2_names_without_prefix_and_with_masks_load() -> None:
    decoder = Decoder(preset("tiny-gpt2"))
    initialise(decoder, 0)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in to_hf_state(decoder).items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    other = Decoder(preset("tiny-gpt2"))
    load_hf_state(other, bare)
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), other.parameters(), strict=True))


def test_older_configs_keep_rope_in_two_keys() -> None:
    base = {"model_type": "llama"} | {key: value for key, value in LLAMA.items() if key != "attn_implementation"}
    scaling = {key: value for key, value in SCALED.items() if key != "rope_theta"}
    old = model_from_hf_config(base | {"rope_theta": 1000.0, "rope_scaling": scaling})
    assert old == model_from_hf_config(base | {"rope_parameters": SCALED})
    assert Model(**old).rope_scaling is not None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "bert"}, "model_type"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "lacks original_max_position_embeddings"),
        ({"rope_scaling": YARN | {"attention_factor": 2.0}}, "has attention_factor"),
        (
            {"model_type": "mistral", "sliding_window": 4}
            | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types",
        ),
        (QWEN3 | {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]"),
        (QWEN3 | {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        (EXPERTS | {"model_type": "olmoe", "num_experts": 4, "clip_qkv": 8.0}, "clip_qkv = 8.0"),
        (MIXTRAL | {"num_experts": 8}, "num_experts = 8 but num_local"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        (EXPERTS | {"model_type": "gpt_oss", "num_local_experts": 4, "swiglu_alpha": 1.0}, "swiglu_alpha"),
        (EXPERTS | {"model_type": "gpt_oss", "num_local_experts": 4, "attention_bias": False}, "attention_bias"),
        (LATENT | {"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob"),
        (LATENT | {"model_type": "deepseek_v3", "rope_interleave": False}, "rope_interleave"),
        (LATENT | {"model_type": "deepseek_v3", "num_key_value_heads": 2}, "num_key_value_heads = 2"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            "layer_types",
        ),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": None}, "hidden_size"),
        ({"sliding_window": 4}, "sliding_window = 4 but llama models have none"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks high_freq_factor"),
        ({"rope_scaling": {"rope_type": "default", "mscale": 2.0}}, "has mscale"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "has full_attention"),
        ({"rope_parameters": SCALED, "rope_scaling": SCALED | {"factor": 2.0}}, "rope_parameters and rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"auto_map": {"AutoModel": "modeling.Own"}}, "auto_map"),
        ({"model_type": "gpt2", "n_embd": 48, "scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        model_from_hf_config({"model_type": "llama"} | LLAMA | change)


def test_incomplete_surplus_and_misshapen_weights_are_refused() -> None:
    decoder = Decoder(preset("tiny-llama"))
    initialise(decoder, 0)
    state = to_hf_state(decoder)
    with pytest.raises(UserError, match=r"lack model\.norm\.weight"):
        load_hf_state(decoder, {name: tensor for name, tensor in state.items() if name != "model.norm.weight"})
    with pytest.raises(UserError, match="does not use"):
        load_hf_state(decoder, state | {"model.extra.weight": torch.zeros(1)})
    with pytest.raises(UserError, match="shape"):
        load_hf_state(decoder, state | {"model.norm.weight": torch.zeros(3)})


EIGHT = {"count": 8, "top_k": 2, "ffn_width": 32}


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "layernorm"},
        {"sinks": True},
        {"qk_norm": True, "qk_norm_over": "width"},
        {"sliding_window": 16, "window_layers": "alternate"},
        {"experts": EIGHT | {"balance_rate": 0.001}},
        {"experts": EIGHT | {"normalised": False}},
        {"experts": EIGHT | {"shared_width": 32}},
        {"experts": EIGHT | {"scores": "sigmoid"}},
    ],
)
def test_a_shape_no_family_has_is_not_exported(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="match no Hugging Face family"):
        model_to_hf_config(preset("tiny-llama", **changes))
