"""torchtitan 0.3's Trainer on one GPU: its Llama in the setting's shape, tokens in memory, nothing saved.

0.3.0 is made for a nightly torch. On released ones it needs four things, all of which are here: a name that it imports
and does not use on one rank (`DataParallelMeshDims`), `set_timeout`, which it calls after its first step and which
changes nothing for one rank, the final norm sharded apart from the head, which its chunked
loss calls alone, and its DTensor backend, since the other needs arguments that `fully_shard` does not have yet. It is
measured with its chunked loss, without CUDA graphs and with torch's fused attention, which was the fastest and the
leanest of its choices on an H200 (its own, FlexAttention with masks of documents, was 5% slower).
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import standins  # noqa: F401  before torchtitan, which looks for what it stands in for
import torch
import torch.distributed.fsdp
from shapes import CLIP, LEARNING_RATE, ROPE_FACTOR, ROPE_THETA, Setting
from window import Window, kept_formats, one_process, read_request, synthetic_tokens

if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    torch.distributed.fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = lambda *_: None

import torchtitan.distributed.fsdp as sharding
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

NAME = "peers"


class NoTokenizer(BaseTokenizer):
    """torchtitan's trainer asks for a tokenizer; the tokens are in memory, so none of its methods is ever called."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class Tokens(BaseDataLoader):
    """Batches from sequences in memory, endlessly."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        setting: Any = None

    def __init__(self, config: Config, **_: Any) -> None:
        setting = config.setting
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


class TimedTrainer(Trainer):
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
            self.formats = kept_formats(self.model_parts[0], next(iter(self.optimizers)))
        self.window.step_ended()


def shard_apart(fully_shard: Any) -> Any:
    """`fully_shard`, with each of several modules sharded for itself: its list of the final norm and the head."""

    def each(modules: Any, **given: Any) -> Any:
        for module in modules if isinstance(modules, list) else [modules]:
            fully_shard(module, **given)
        return modules

    return each


def spec_of(setting: Setting) -> ModelSpec:
    """torchtitan's Llama in the setting's shape, made as its own sizes are."""
    rope = llama3.ComplexRoPE.Config(
        dim=setting.width // setting.heads,
        max_seq_len=131072,
        theta=ROPE_THETA,
        scaling="llama",
        scaling_factor=ROPE_FACTOR,
    )
    layers = llama3._build_llama3_layers(
        n_layers=setting.layers,
        dim=setting.width,
        n_heads=setting.heads,
        n_kv_heads=setting.kv_heads,
        hidden_dim=setting.ffn_width,
        rope=rope,
        fuse_qkv=True,
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = llama3.Llama3Model.Config(
        dim=setting.width,
        vocab_size=setting.vocab_size,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=setting.vocab_size, embedding_dim=setting.width, param_init=llama3._EMBEDDING_INIT
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=setting.width, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=setting.width,
            out_features=setting.vocab_size,
            param_init=llama3._output_linear_init(setting.width),
        ),
        layers=layers,
    )
    return ModelSpec(
        name=NAME,
        flavor=NAME,
        model=model,
        parallelize_fn=llama3.parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def config_of(setting: Setting, steps: int, folder: str) -> Trainer.Config:
    """torchtitan's configuration: its defaults except for the setting's fields."""
    compute = {"bf16": "bfloat16", "fp32": "float32"}[setting.compute]
    return Trainer.Config(
        model_spec=spec_of(setting),
        dump_folder=folder,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=setting.vocab_size)),
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(setting=setting),
        optimizer=default_adamw(lr=LEARNING_RATE),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=setting.micro_batch,
            seq_len=setting.sequence_length,
            steps=steps,
            max_norm=CLIP,
            mixed_precision_param=compute,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=FullAC.Config() if setting.recompute == "full" else None,
        compile=CompileConfig(enable=setting.compile),
        metrics=MetricsProcessor.Config(log_freq=1_000_000),  # logging waits for the device; it logs the first step
    )


def main() -> None:
    """Train, and write what was measured."""
    setting, window, file = read_request()
    if setting.device == "cpu":
        sys.exit("skipped: torchtitan trains on GPUs only")
    if setting.experts or setting.tied:
        sys.exit("skipped: torchtitan 0.3 is measured untied and without experts only")
    one_process()
    sharding.fully_shard = shard_apart(sharding.fully_shard)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(config_of(setting, window.warmup + window.steps, folder))
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
