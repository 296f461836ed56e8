"""What of a Hugging Face config.json is known: the families, and every field by how it is handled; the rest is
rejected by name."""

from collections.abc import Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.job.presets.spelling import is_other_mixture

EXPERT_FAMILIES = ("mixtral", "olmoe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
"""Those among them that are mixtures of experts."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "llava", *EXPERT_FAMILIES)
"""The values of model_type that are supported; llava is one of the others behind an encoder of pictures."""
_EXPERTS = "num_experts num_local_experts n_routed_experts num_experts_per_tok moe_intermediate_size moe_num_experts"
_READ = """
model_type vocab_size tie_word_embeddings
hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size
max_position_embeddings hidden_act rms_norm_eps attention_bias mlp_bias
sliding_window use_sliding_window max_window_layers layer_types
rope_theta rope_scaling rope_parameters partial_rotary_factor
n_embd n_layer n_head n_inner n_positions n_ctx activation_function layer_norm_epsilon
scale_attn_weights scale_attn_by_inverse_layer_idx add_cross_attention
"""
_READ_OF_EXPERTS = """
num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
decoder_sparse_step mlp_only_layers swiglu_alpha swiglu_limit
n_routed_experts n_shared_experts first_k_dense_replace moe_layer_freq
n_group topk_group topk_method scoring_func routed_scaling_factor
kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim qk_head_dim rope_interleave
"""
_IRRELEVANT_OF_EXPERTS = """
router_aux_loss_coef output_router_logits aux_loss_alpha seq_aux ep_size
num_nextn_predict_layers experts_per_token initial_context_length
"""
_IRRELEVANT = """
_name_or_path architectures transformers_version dtype torch_dtype use_cache initializer_range pretraining_tp
bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id
attention_dropout hidden_dropout attn_pdrop embd_pdrop resid_pdrop summary_first_dropout
summary_activation summary_proj_to_labels summary_type summary_use_proj
id2label label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix
return_dict output_attentions output_hidden_states use_return_dict torchscript use_bfloat16 tf_legacy_loss
chunk_size_feed_forward gradient_checkpointing reorder_and_upcast_attn
attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset
max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
unsloth_fixed unsloth_version
"""
READ = frozenset(_READ.split())
"""Fields that determine the function the model computes."""
IRRELEVANT = frozenset(_IRRELEVANT.split())
"""Dropout is a choice of each training (model.dropout), initial weights already exist, and token ids come with the
tokenizer's files; the rest is bookkeeping, or computes the same arithmetic another way."""
READ_OF_EXPERTS = frozenset(_READ_OF_EXPERTS.split())
IRRELEVANT_OF_EXPERTS = frozenset(_IRRELEVANT_OF_EXPERTS.split())
"""The same for mixtures of experts only. Losses that balance experts are a choice of each training (model.experts), and
DeepSeek-V3's extra layer, which predicts a second token, is left out unless a job asks for it (model.extra_tokens);
gpt-oss has two fields twice."""
_OWN_CODE = ("deepseek_v2", "deepseek_v3")
"""Families whose folders contain their own code, which is never run, although transformers has them too."""


def require_family(config: Mapping[str, Any]) -> None:
    """Reject by its model_type a model of a family that the decoder does not cover."""
    family = config.get("model_type")
    remedy = f"use a {', '.join(FAMILIES[:-1])} or {FAMILIES[-1]} model"
    if family is None:
        raise UserError(f"config.json has no model_type, by which a model's family is known; {remedy}")
    if family in EXPERT_FAMILIES:
        return
    inner = config.get("text_config")  # of a model that reads images, too
    fields = {**(inner if isinstance(inner, dict) else {}), **config}
    experts = next((key for key in _EXPERTS.split() if fields.get(key)), None)
    shown = f"config.json has model_type = {_shown(family)}"
    if experts is not None and family in FAMILIES:
        shown += f" and {experts} = {_shown(fields[experts])}"
    if experts is not None or is_other_mixture(str(family).replace("_", "-")):
        raise UserError(f"{shown}, a mixture of experts of a family that Meshwright does not support; {remedy}")
    if family not in FAMILIES:
        raise UserError(f"{shown}, a family that Meshwright does not support; {remedy}")


def require_known_fields(config: Mapping[str, Any]) -> None:
    """Reject by name a field that might change the model and that is not supported.

    A field that is null, false, 0 or empty enables nothing and is accepted.
    """
    known, family = READ | IRRELEVANT, config["model_type"]
    if family in EXPERT_FAMILIES:
        known |= READ_OF_EXPERTS | IRRELEVANT_OF_EXPERTS
    if family in _OWN_CODE:
        known |= {"auto_map"}
    for key, value in config.items():
        if not value or key in known:
            continue
        if key == "quantization_config" and family == "gpt_oss" and _method(value) == "mxfp4":
            continue  # as it is published; exact in fp32
        if key == "quantization_config" and _is_readable(value):
            continue  # as what its codes stand for
        if key == "quantization_config":
            raise UserError(
                "config.json has quantization_config, and quantized weights cannot be trained; use the folder of the "
                "model they were quantized from"
            )
        raise UserError(
            f"config.json has {key} = {_shown(value)}, which Meshwright does not support; use another model, or "
            "remove it if the model works the same without it"
        )


def _is_readable(quantization: Any) -> bool:
    """Whether weights are in one of the formats of bitsandbytes that model.adapter.base can have."""
    if _method(quantization) != "bitsandbytes":
        return False
    nf4 = quantization.get("bnb_4bit_quant_type") == "nf4" and quantization.get("bnb_4bit_use_double_quant")
    return bool(quantization.get("load_in_8bit") or (quantization.get("load_in_4bit") and nf4))


def _method(quantization: Any) -> Any:
    return quantization.get("quant_method") if isinstance(quantization, dict) else None


def _shown(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
