"""A model that transformers saved learns made conversations, and its exported folder answers in transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from rich.console import Console

from meshwright.data import prepare, training_stream
from meshwright.data.tokenizer import train_tokenizer
from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.runs.chat import open_chat
from meshwright.runs.huggingface import export_run

WORDS = ("apple", "bread", "cloud", "drum", "eagle", "fern", "grape", "house", "island", "jacket")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
IGNORE = -100
JOB = """
[model]
init_from = "{folder}"
[data]
sources = ["{path}/talk.jsonl"]
format = "conversations"
packing = "best-fit"
mask_documents = true
validation_fraction = 0.1
cache = "{path}/cache"
workers = 0
[batch]
sequence_length = 64
global_batch = 8
micro_batch = 4
[optimizer]
lr = 1e-2
weight_decay = 0.0
[evaluation]
every_steps = 60
sample_tokens = 0
[run]
steps = 60
device = "cpu"
folder = "{path}/run"
"""


def talk(number: int) -> list[dict[str, str]]:
    """Which word comes after which, asked with idle words before."""
    asked = WORDS[number % len(WORDS)]
    idle = " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(number % 4))
    answer = WORDS[(number + 1) % len(WORDS)]
    return [{"role": "user", "content": f"{idle} after {asked}?"}, {"role": "assistant", "content": f"{answer}"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base model as transformers saves it, with a tokenizer that has a chat template: it stops at the end of
    text, and not where the template ends a turn."""
    path = tmp_path_factory.mktemp("model")
    inner = tokenizers.Tokenizer.from_str(train_tokenizer([" ".join(WORDS) + " after ? "] * 40, 330).to_json())
    inner.add_special_tokens([tokenizers.AddedToken(f"<|{name}|>") for name in ("user", "assistant", "end")])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fine-tuned run."""
    path = tmp_path_factory.mktemp("run")
    lines = (json.dumps({"messages": talk(number)}) for number in range(200))
    (path / "talk.jsonl").write_text("\n".join(lines))
    job = path / "job.toml"
    job.write_text(JOB.format(folder=folder, path=path))
    run_job(load_job(str(job)), Console(quiet=True))
    return path


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_the_first_loss_is_that_of_the_assistants_tokens_alone(folder: Path, run: Path) -> None:
    """Every conversation by itself through transformers, with labels where the assistant speaks and nowhere else."""
    job = load_job(str(run / "job.toml")).job
    stream = training_stream(prepare(job.data, job.model.vocab_size), job.data, 64, job.run.seed)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    assistant, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    total, count = 0.0, 0
    for sample in map(stream.read, range(8)):
        document_ids = np.cumsum(sample.positions_S[: sample.length] == 0) - 1
        for number in range(int(document_ids[-1]) + 1):
            tokens = torch.from_numpy(sample.tokens_S[: sample.length][document_ids == number])
            begins = tokens.tolist().index(assistant) + 1
            stops = begins + tokens.tolist()[begins:].index(end) + 1
            labels = torch.full_like(tokens, IGNORE)
            labels[begins:stops] = tokens[begins:stops]
            logits = model(tokens[None]).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=IGNORE, reduction="sum"))
            count += stops - begins
    first = next(row["loss"] for row in rows(run) if "loss" in row)
    assert first == pytest.approx(total / count, rel=1e-4)


def test_the_loss_of_the_answers_falls(run: Path) -> None:
    held_out = [row["val_loss"] for row in rows(run) if "val_loss" in row]
    losses = [row["loss"] for row in rows(run) if "loss" in row]
    assert held_out[-1] < 0.2 * held_out[0] and losses[-1] < 0.2 * losses[0]


def test_the_exported_folder_answers_in_transformers_as_the_run_does(run: Path, tmp_path: Path) -> None:
    export_run(run / "run", tmp_path / "out", "fp32")
    chats = [open_chat(path, "cpu", temperature=0, tokens=12) for path in (run / "run", tmp_path / "out")]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for number in range(len(WORDS)):
        asked, answer = talk(number)
        prompt = tokenizer.apply_chat_template(
            [asked], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        written = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(written) == answer["content"] + "<|end|>"
        for chat in chats:
            chat.messages.clear()
            assert (chat.ask(asked["content"]), chat.stopped) == (answer["content"], "<|end|>")


def test_a_second_fine_tune_starts_with_what_the_first_learned(run: Path, tmp_path: Path) -> None:
    export_run(run / "run", tmp_path / "out", "fp32")
    (tmp_path / "talk.jsonl").write_text((run / "talk.jsonl").read_text())
    text = JOB.format(folder=tmp_path / "out", path=tmp_path).replace("steps = 60", "steps = 1")
    (tmp_path / "job.toml").write_text(text.replace("lr = 1e-2", "lr = 1e-9"))
    run_job(load_job(str(tmp_path / "job.toml")), Console(quiet=True))
    assert not (tmp_path / "run/generation_config.json").exists()  # what it came with says all
    export_run(tmp_path / "run", tmp_path / "again", "fp32")
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    asked, answer = talk(3)
    assert open_chat(tmp_path / "run", "cpu", temperature=0).ask(asked["content"]) == answer["content"]
