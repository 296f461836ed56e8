"""torchtitan's Trainer over the text of speedrun.py: its Llama, its default optimizer and schedule, held-out losses."""

import json
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import standins  # noqa: F401  before torchtitan, which looks for what it stands in for
import torch
import torchtitan.train
import torchtitan_train
from curve import Curve, held_out_loss, read_request, read_tokens
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import JobConfig
from window import one_process


class Tokens(BaseDataLoader):
    """The given sequences in their order."""

    def __init__(self, tokens: torch.Tensor, micro_batch: int) -> None:
        self._batches = tokens.split(micro_batch)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self._batches:
            tokens = batch.long()
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Nothing is saved."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is loaded."""


class JudgedTrainer(torchtitan.train.Trainer):
    """torchtitan's own, with held-out losses between its steps."""

    curve: Curve

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        self.curve.step_ended()


def main() -> None:
    """Train, and write the curve."""
    setting, asked, file = read_request()
    if setting.device == "cpu":
        sys.exit("skipped: torchtitan trains on GPUs only")
    train, held_out = read_tokens(asked["tokens"])
    one_process()
    torchtitan_train.Tokens = lambda _: Tokens(train, setting.micro_batch)  # type: ignore[misc,assignment]
    torchtitan_train.register(setting)
    with tempfile.TemporaryDirectory() as folder:
        job, usual = torchtitan_train.job_of(setting, asked["steps"], folder), JobConfig()
        job.optimizer.lr = usual.optimizer.lr
        # Its default, a fifth of the steps at most, as its documentation advises.
        job.lr_scheduler.warmup_steps = min(usual.lr_scheduler.warmup_steps, asked["steps"] // 5)
        job.debug.seed = asked["seed"]
        trainer = JudgedTrainer(job)
        model = trainer.model_parts[0]
        groups = held_out.to(trainer.device).unflatten(0, (-1, setting.micro_batch))

        def logits(tokens: torch.Tensor) -> torch.Tensor:
            with trainer.maybe_enable_amp:
                result: torch.Tensor = model(tokens)
            return result

        trainer.curve = Curve(asked, lambda: held_out_loss(logits, groups), setting.device)
        trainer.curve.start()
        trainer.train()
        trainer.close()
    torch.distributed.destroy_process_group()
    result = {
        "marks": trainer.curve.marks,
        "losses": trainer.curve.losses,
        "parameters": sum(each.numel() for each in model.parameters()),
        "versions": {"torchtitan": version("torchtitan"), "torch": torch.__version__},
    }
    file.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
