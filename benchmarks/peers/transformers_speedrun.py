"""transformers' Trainer over the text of speedrun.py: LlamaForCausalLM, its default optimizer and schedule at GPT-2's
learning rate (its default of 5e-5 is for fine-tuning), held-out losses."""

import json
import tempfile
from typing import Any

import accelerate  # the Trainer needs it: without it, say so before anything slow is imported
import torch
import transformers
from curve import Curve, held_out_loss, read_request, read_tokens
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers_trainer import llama

LEARNING_RATE = 6e-4


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The given sequences; the model shifts the labels itself, so it sees the last label as a token, too."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[index].long()[:-1]
        return {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):
    """Tells the curve of every step."""

    def __init__(self) -> None:
        self.curve: Curve | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        assert self.curve is not None
        self.curve.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        assert self.curve is not None
        self.curve.step_ended()


def main() -> None:
    """Train, and write the curve."""
    setting, asked, file = read_request()
    train, held_out = read_tokens(asked["tokens"])
    transformers.set_seed(asked["seed"])
    model, clock = llama(setting), Clock()
    groups = held_out.to(setting.device).unflatten(0, (-1, setting.micro_batch))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=asked["steps"],
            per_device_train_batch_size=setting.micro_batch,
            bf16=setting.compute == "bf16",
            torch_compile=setting.compile,
            learning_rate=LEARNING_RATE,
            seed=asked["seed"],
            logging_strategy="no",
            logging_nan_inf_filter=False,  # it would wait for the device in every step
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=setting.device == "cpu",
        )
        trainer = Trainer(model, arguments, train_dataset=Sequences(train), callbacks=[clock])

        def logits(tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast(setting.device, torch.bfloat16, enabled=setting.compute == "bf16"):
                result: torch.Tensor = model(input_ids=tokens).logits
            return result

        clock.curve = Curve(asked, lambda: held_out_loss(logits, groups), setting.device)
        trainer.train()
    versions = {each.__name__: each.__version__ for each in (transformers, accelerate, torch)}
    result = {
        "marks": clock.curve.marks,
        "losses": clock.curve.losses,
        "parameters": sum(each.numel() for each in model.parameters()),
        "versions": versions,
    }
    file.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
