"""transformers' Trainer on one device: LlamaForCausalLM from a config, tokens in memory, nothing saved."""

import json
import sys
import tempfile
from typing import Any

import accelerate  # the Trainer needs it: without it, say so before anything slow is imported
import torch
import transformers
from shapes import CLIP, LEARNING_RATE, NORM_EPS, ROPE_FACTOR, ROPE_THETA, Setting
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from window import Window, kept_formats, read_request, synthetic_tokens


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences in memory; the model shifts the labels itself."""

    def __init__(self, setting: Setting, length: int) -> None:
        self._tokens, self._length = synthetic_tokens(setting, 64, setting.sequence_length), length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[index % len(self._tokens)]
        return {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):
    """Marks the end of each step in the window, and records once what is kept while gradients exist."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self.formats: dict[str, Any] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        if self._window.ended == self._window.warmup - 1:  # the first step has no optimizer states yet
            self.formats = kept_formats(found["model"], found["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self._window.step_ended()


def llama(setting: Setting) -> LlamaForCausalLM:
    """The setting's model, created on its device in fp32."""
    config = LlamaConfig(
        vocab_size=setting.vocab_size,
        hidden_size=setting.width,
        intermediate_size=setting.ffn_width,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.kv_heads,
        max_position_embeddings=max(131072, setting.sequence_length),
        rms_norm_eps=NORM_EPS,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": ROPE_THETA,
            "factor": ROPE_FACTOR,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=setting.tied,
        use_cache=False,
    )
    with torch.device(setting.device):
        return LlamaForCausalLM(config)


def mixture(setting: Setting) -> Qwen3MoeForCausalLM:
    """The same with experts; it has no forced balance, and its loss for balance is off as by default."""
    config = Qwen3MoeConfig(
        vocab_size=setting.vocab_size,
        hidden_size=setting.width,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.kv_heads,
        head_dim=setting.head_dim,
        num_experts=setting.experts,
        num_experts_per_tok=setting.top_k,
        moe_intermediate_size=setting.ffn_width,
        norm_topk_prob=True,
        rms_norm_eps=NORM_EPS,
        max_position_embeddings=setting.sequence_length,
        tie_word_embeddings=setting.tied,
        use_cache=False,
    )
    with torch.device(setting.device):
        return Qwen3MoeForCausalLM(config)


def main() -> None:
    """Train, and write what was measured."""
    setting, window, file = read_request()
    steps = window.warmup + window.steps
    if setting.forced_balance:
        sys.exit("skipped: transformers has no forced balance")
    model: PreTrainedModel = mixture(setting) if setting.experts else llama(setting)
    clock = Clock(window)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=setting.micro_batch,
            bf16=setting.compute == "bf16",
            torch_compile=setting.compile and not setting.experts,  # their number of tokens would be compiled in
            gradient_checkpointing=setting.recompute == "full",
            optim="adamw_torch_fused",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=CLIP,
            logging_strategy="no",
            logging_nan_inf_filter=False,  # it would wait for the device in every step
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=setting.device == "cpu",
        )
        trainer = Trainer(
            model, arguments, train_dataset=Tokens(setting, steps * setting.micro_batch), callbacks=[clock]
        )
        outcome = trainer.train()
    versions = {each.__name__: each.__version__ for each in (transformers, accelerate, torch)}
    result = {
        **window.result(),
        "parameters": sum(each.numel() for each in model.parameters()),
        "loss": outcome.training_loss,
        "formats": clock.formats,
        "versions": versions,
    }
    file.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
