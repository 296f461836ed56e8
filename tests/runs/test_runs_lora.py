"""Adapters trained next to a frozen model: they alone change its answers, and its files are needed to use them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from rich.console import Console

from meshwright.checkpoint import checkpoint_path, newest_weights
from meshwright.data.tokenizer import train_tokenizer
from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.runs.chat import open_chat
from meshwright.runs.evaluate import evaluate_run
from meshwright.runs.huggingface import export_run

WORDS = ("apple", "bread", "cloud", "drum", "eagle", "fern", "grape", "house", "island", "jacket")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
JOB = """
[model]
init_from = "{folder}"
[model.adapter]
rank = 8
alpha = 16
dropout = 0.05
{adapter}
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
micro_batch = 8
[optimizer]
lr = 2e-2
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
    """A tiny model that knows nothing, as transformers saves it."""
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
        initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def train(folder: Path, path: Path, adapter: str = "", *overrides: str) -> None:
    lines = (json.dumps({"messages": talk(number)}) for number in range(200))
    (path / "talk.jsonl").write_text("\n".join(lines))
    (path / "job.toml").write_text(JOB.format(folder=folder, path=path, adapter=adapter))
    run_job(load_job(str(path / "job.toml"), overrides), Console(quiet=True))


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    train(folder, path, "dora = true")
    return path


def right_answers(source: Path) -> int:
    chat = open_chat(source, "cpu", temperature=0, tokens=12)
    right = 0
    for number in range(200, 220):
        asked, answer = talk(number)
        chat.messages.clear()
        right += chat.ask(asked["content"]) == answer["content"]
    return right


def test_adapters_alone_teach_a_model_its_answers(folder: Path, run: Path) -> None:
    assert right_answers(folder) == 0
    assert right_answers(run / "run") == 20


def test_a_checkpoint_holds_the_adapters_and_names_what_they_belong_to(folder: Path, run: Path) -> None:
    checkpoint = newest_weights(run / "run")
    names = checkpoint.names("model/")
    assert len(names) == 2 * 7 * 3 and all(name.rpartition(".")[2].startswith("lora_") for name in names)
    assert len(checkpoint.facts.base) == 64


def test_the_merged_folder_answers_in_transformers_as_the_run_does(run: Path, tmp_path: Path) -> None:
    export_run(run / "run", tmp_path / "out", "fp32")
    assert right_answers(tmp_path / "out") == 20
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    asked, answer = talk(3)
    prompt = tokenizer.apply_chat_template([asked], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(written) == answer["content"] + "<|end|>"


def test_a_run_is_evaluated_with_its_adapters(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
    held_out = [row["val_loss"] for row in rows if "val_loss" in row]
    assert held_out[-1] < 0.2 * held_out[0]
    scores, step = evaluate_run(run / "run", {}, "cpu", None)
    assert step == 60
    assert scores["held-out"].loss == pytest.approx(held_out[-1], rel=1e-5)


@pytest.mark.thorough
def test_a_run_resumes_and_refuses_other_weights(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "model"
    shutil.copytree(folder, own)
    steps = ("run.steps=4", "schedule.warmup_steps=1", "evaluation.every_steps=0", "checkpoint.every_steps=2")
    (tmp_path / "whole").mkdir()
    train(own, tmp_path / "whole", "", *steps)
    (tmp_path / "cut").mkdir()
    train(own, tmp_path / "cut", "", *steps)
    shutil.rmtree(checkpoint_path(tmp_path / "cut/run", 4))
    job = load_job(str(tmp_path / "cut/job.toml"), steps)
    run_job(job, Console(quiet=True), resume=True)
    saved = [newest_weights(tmp_path / name / "run") for name in ("whole", "cut")]
    assert [one.facts.step for one in saved] == [4, 4]
    for name in saved[0].names("model/"):
        with saved[0], saved[1]:
            assert torch.equal(saved[0].whole(name), saved[1].whole(name))
    shutil.rmtree(checkpoint_path(tmp_path / "cut/run", 4))
    with torch.no_grad():
        model = transformers.LlamaForCausalLM.from_pretrained(own)
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
        model.save_pretrained(own)
    with pytest.raises(UserError, match="was trained next to other weights than those"):
        run_job(job, Console(quiet=True), resume=True)
