"""Prints the losses that TRL's DPOTrainer computes for the pairs of `preference_pairs.py`.

Run it with trl installed: `PYTHONPATH=. python tests/train/trl_values.py`. Its output with trl 1.16.0 is recorded in
`test_train_preference.py`; trl, datasets and pandas are too much to install for every run of the tests.
"""

import json
import sys
import tempfile
from pathlib import Path

import datasets
import tokenizers
import torch
import transformers
import trl

sys.path.insert(0, str(Path(__file__).parent))
from preference_pairs import END, PAIRS, SHAPE, model

from meshwright.job import model_to_hf_config
from meshwright.model import to_hf_state


def main() -> None:
    vocabulary = {str(token): token for token in range(SHAPE.vocab_size)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=str(END), pad_token="51")
    rows = [dict(zip(("prompt", "chosen", "rejected"), map(_words, pair), strict=True)) for pair in PAIRS]
    for row in rows:
        row["chosen"], row["rejected"] = " " + row["chosen"], " " + row["rejected"]
    found = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    for loss, beta in (("sigmoid", 0.1), ("sigmoid", 0.5), ("ipo", 0.1)):
        with tempfile.TemporaryDirectory() as folder:
            settings = trl.DPOConfig(
                folder, beta=beta, loss_type=[loss], per_device_train_batch_size=len(rows), bf16=False, use_cpu=True,
                gradient_checkpointing=False, report_to=[], max_length=None,
            )  # fmt: skip
            trainer = trl.DPOTrainer(
                _theirs(0.0), ref_model=_theirs(0.5), args=settings, processing_class=tokenizer,
                train_dataset=datasets.Dataset.from_list(rows),
            )  # fmt: skip
            trainer.model.train()
            batch = trainer.data_collator([trainer.train_dataset[number] for number in range(len(rows))])
            value = float(trainer.compute_loss(trainer.model, batch))
            found[f"{loss} {beta:g}"] = value
            found["tokens"] = batch["input_ids"].tolist()
    print(json.dumps(found, indent=1))


def _words(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def _theirs(phase: float) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(**model_to_hf_config(SHAPE))
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    theirs.load_state_dict(to_hf_state(model(phase, torch.float32)))
    return theirs


if __name__ == "__main__":
    main()
