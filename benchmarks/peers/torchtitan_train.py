"""torchtitan's Trainer on one GPU: its Llama in the setting's shape, tokens in memory, nothing saved."""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import standins  # noqa: F401  before torchtitan, which looks for what it stands in for
import torch
import torchtitan.train
from shapes import BALANCE_RATE, CLIP, LEARNING_RATE, NORM_EPS, ROPE_FACTOR, ROPE_THETA, Setting
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import JobConfig
from torchtitan.models import llama3, qwen3
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from window import Window, kept_formats, one_process, read_request, synthetic_tokens

NAME = "peers"


class TiedTransformer(llama3.Transformer):
    """torchtitan's Llama, whose head is the embedding table."""

    def __init__(self, arguments: llama3.TransformerModelArgs) -> None:
        super().__init__(arguments)
        self.output.weight = self.tok_embeddings.weight

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Moving off the meta device has separated the two."""
        self.output.weight = self.tok_embeddings.weight
        super().init_weights(buffer_device)


class Tokens(BaseDataLoader):
    """Batches from sequences in memory, endlessly."""

    def __init__(self, setting: Setting) -> None:
        self._batches = synthetic_tokens(setting, 64, setting.sequence_length + 1).split(setting.micro_batch)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for tokens in self._batches:
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Nothing is saved."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is loaded."""


class TimedTrainer(torchtitan.train.Trainer):
    """torchtitan's own, with the end of each step marked."""

    window: Window
    loss: torch.Tensor
    formats: dict[str, Any]

    def forward_backward_step(self, **given: Any) -> torch.Tensor:
        loss = super().forward_backward_step(**given)
        self.loss = loss.detach()
        return loss

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        if self.window.ended == 0:
            self.formats = kept_formats(self.model_parts[0], self.optimizers.optimizers[0])
        self.window.step_ended()


def register(setting: Setting) -> None:
    """Register the setting's model with torchtitan, with no tokenizer and with our tokens."""
    model, arguments, usual = mixture(setting) if setting.experts else llama(setting)
    spec = dataclasses.replace(
        usual,
        model_cls=model,
        model_args={NAME: arguments},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda **_: Tokens(setting),
        build_validator_fn=None,
        state_dict_adapter=None,
    )
    register_train_spec(NAME, spec)


def llama(setting: Setting) -> tuple[Any, Any, TrainSpec]:
    """torchtitan's Llama."""
    arguments = llama3.TransformerModelArgs(
        dim=setting.width,
        n_layers=setting.layers,
        n_heads=setting.heads,
        n_kv_heads=setting.kv_heads,
        vocab_size=setting.vocab_size,
        # Two thirds of 4 · width · multiplier, rounded up to a multiple of ffn_width: ffn_width itself.
        ffn_dim_multiplier=setting.ffn_width / (4 * setting.width),
        multiple_of=setting.ffn_width,
        norm_eps=NORM_EPS,
        rope_theta=ROPE_THETA,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=ROPE_FACTOR),
    )
    return TiedTransformer if setting.tied else llama3.Transformer, arguments, llama3.get_train_spec()


def mixture(setting: Setting) -> tuple[Any, Any, TrainSpec]:
    """torchtitan's Qwen3 with experts, its routing as in its own Qwen3-30B-A3B."""
    arguments = qwen3.Qwen3ModelArgs(
        dim=setting.width,
        n_layers=setting.layers,
        n_heads=setting.heads,
        n_kv_heads=setting.kv_heads,
        head_dim=setting.head_dim,
        vocab_size=setting.vocab_size,
        hidden_dim=setting.ffn_width,
        norm_eps=NORM_EPS,
        rope_theta=ROPE_THETA,
        qk_norm=True,
        max_seq_len=setting.sequence_length,
        moe_enabled=True,
        moe_inter_dim=setting.ffn_width,
        moe_args=MoEArgs(
            num_experts=setting.experts,
            num_shared_experts=0,
            top_k=setting.top_k,
            score_func="softmax",
            route_norm=True,
            score_before_experts=False,
            load_balance_coeff=BALANCE_RATE,
        ),
    )
    return qwen3.Qwen3Model, arguments, qwen3.get_train_spec()


def job_of(setting: Setting, steps: int, folder: str) -> JobConfig:
    """torchtitan's configuration: its defaults except for the setting's fields."""
    job = JobConfig()
    job.job.dump_folder = folder
    job.model.name = job.model.flavor = NAME
    job.training.local_batch_size = setting.micro_batch
    job.training.seq_len = setting.sequence_length
    job.training.steps = steps
    job.training.max_norm = CLIP
    job.training.mixed_precision_param = {"bf16": "bfloat16", "fp32": "float32"}[setting.compute]
    job.optimizer.lr = LEARNING_RATE
    job.lr_scheduler.warmup_steps = 2
    job.compile.enable = setting.compile
    job.debug.moe_force_load_balance = setting.forced_balance
    job.activation_checkpoint.mode = setting.recompute
    job.metrics.log_freq = 1_000_000  # logging waits for the device; it logs the first step in any case
    return job


def main() -> None:
    """Train, and write what was measured."""
    setting, window, file = read_request()
    if setting.device == "cpu":
        sys.exit("skipped: torchtitan trains on GPUs only")
    one_process()
    register(setting)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(job_of(setting, window.warmup + window.steps, folder))
        trainer.window = window
        trainer.train()
        trainer.close()
    torch.distributed.destroy_process_group()
    result = {
        **window.result(),
        "parameters": sum(each.numel() for each in trainer.model_parts[0].parameters()),
        "loss": trainer.loss.item(),
        "formats": trainer.formats,
        "versions": {"torchtitan": version("torchtitan"), "torch": torch.__version__},
    }
    file.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
