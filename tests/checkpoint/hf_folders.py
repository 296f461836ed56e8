"""Tiny Hugging Face models with values away from zero biases and unit norms, which would hide a mistake."""

from pathlib import Path
from typing import Any

import torch
import transformers

from meshwright.data.tokenizer import train_tokenizer

_LLAMA = {
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_SCALED = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GPT2 = {"vocab_size": 301, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
_GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
_EXPERTS = _LLAMA | {"num_experts_per_tok": 2, "pad_token_id": None}
_LATENT = _EXPERTS | {
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "llama-scaled-tied": ("llama", _LLAMA | {"rope_parameters": _SCALED, "tie_word_embeddings": True}),
    "mistral": ("mistral", _LLAMA | {"sliding_window": 7, "head_dim": 8}),
    "qwen2-tied": ("qwen2", _LLAMA | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", _LLAMA | {"head_dim": 12}),
    "gpt2-tied": ("gpt2", _GPT2),
    "gpt2-untied": ("gpt2", _GPT2 | {"tie_word_embeddings": False}),
    "mixtral": ("mixtral", _EXPERTS | {"num_local_experts": 4}),
    "olmoe": ("olmoe", _EXPERTS | {"num_experts": 4}),
    "qwen3-moe": ("qwen3_moe", _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [0]}),
    "gpt-oss": (
        "gpt_oss",
        _EXPERTS | {"num_local_experts": 4, "head_dim": 8, "sliding_window": 7, "rope_parameters": _YARN},
    ),
    "deepseek-v2": ("deepseek_v2", _LATENT | {"topk_method": "group_limited_greedy"}),
    "deepseek-v3": ("deepseek_v3", _LATENT | {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}}),
}
TEXT = "def add(a, b):\n    return a + b  # naïve\n"


def make_folder(path: Path, case: str, dtype: torch.dtype = torch.float32, shard: str = "100KB") -> Any:
    """A folder as transformers writes it, in shards, with a tokenizer; returns the model it holds."""
    family, options = FAMILIES[case]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.05 * torch.randn_like(buffer))
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    model.save_pretrained(path, max_shard_size=shard)
    train_tokenizer([TEXT * 20], 301).save(path / "tokenizer.json")
    (path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'
    )
    return model.eval()
