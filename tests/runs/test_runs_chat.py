"""What is generated and answered is what transformers generates from the same folder, token by token to the stop."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from meshwright.data.tokenizer import train_tokenizer
from meshwright.errors import UserError
from meshwright.runs.chat import Chat, open_chat
from meshwright.runs.generate import generate_from_run
from meshwright.runs.huggingface import export_run, import_folder

TEXT = "what comes after the apple? bread, and then a cloud with a naïve drum. "
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NAMES = ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": 7, "head_dim": 8},
    "qwen2": _LLAMA | {"tie_word_embeddings": True},
    "qwen3": _LLAMA | {"head_dim": 12},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}
ADDS_BOS = ("llama", "mistral")
QUESTIONS = ("what comes after the apple?", "and then?", "a drum")


def make_tokenizer(path: Path, *, adds_bos: bool) -> Any:
    inner = tokenizers.Tokenizer.from_str(train_tokenizer([TEXT] * 20, 300).to_json())
    inner.add_special_tokens([tokenizers.AddedToken(name) for name in NAMES])
    if adds_bos:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", inner.token_to_id("<|bos|>"))]
        )
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|bos|>", eos_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return tokenizer


def make_folder(path: Path, family: str, **generation: Any) -> tuple[Any, Any]:
    """A tiny random model of a family, with a tokenizer and a chat template, as transformers saves them."""
    tokenizer = make_tokenizer(path, adds_bos=family in ADDS_BOS)
    config = transformers.AutoConfig.for_model(
        family, **FAMILIES[family], vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0, pad_token_id=None
    )
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # or it writes one token again and again
    model.generation_config = transformers.GenerationConfig(eos_token_id=0, **generation)
    model.save_pretrained(path)
    return model, tokenizer


def theirs(model: Any, ids: list[int], tokens: int) -> list[int]:
    """What transformers writes behind some tokens, the most likely each time."""
    prompt = torch.tensor([ids])
    with torch.no_grad():
        found = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    written: list[int] = found[0, len(ids) :].tolist()
    return written


def stop_at_one_of(path: Path, model: Any, ids: list[int]) -> int:
    """Make a folder's model stop at a token that it writes after a few others, and at one that it never writes."""
    model.generation_config.eos_token_id = None
    free = theirs(model, ids, 24)
    stop = next(token for place, token in enumerate(free) if place >= 8 and token not in free[:place])
    model.generation_config.eos_token_id = [len(model.get_input_embeddings().weight) - 1, stop]
    model.generation_config.save_pretrained(path)
    return stop


def chat_of(path: Path, tokens: int = 24, system: str | None = None) -> Chat:
    return open_chat(path, "cpu", system, tokens=tokens, temperature=0)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_with_special_tokens_is_continued_as_transformers_does(family: str, tmp_path: Path) -> None:
    folder, run, out = tmp_path / "hf", tmp_path / "run", tmp_path / "out"
    model, tokenizer = make_folder(folder, family)
    for prompt in ("<|user|>naïve<|end|><|assistant|>", "the cloud", "<|bos|>the cloud"):
        ids = tokenizer(prompt, add_special_tokens=not prompt.startswith("<|bos|>"))["input_ids"]
        assert ids[0] == (tokenizer.bos_token_id if family in ADDS_BOS else ids[0]) and ids[1] != ids[0]
        stop = stop_at_one_of(folder, model, ids)
        expected = theirs(transformers.AutoModelForCausalLM.from_pretrained(folder), ids, 24)
        assert expected[-1] == stop and len(expected) < 24
        text = prompt + tokenizer.decode(expected[:-1])
        assert generate_from_run(folder, prompt, 24, 0, 1.0, 0, "cpu") == (text, None)
    import_folder(folder, run)
    assert generate_from_run(run, prompt, 24, 0, 1.0, 0, "cpu") == (text, 0)
    export_run(run, out, "fp32")
    assert (out / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()
    assert theirs(transformers.AutoModelForCausalLM.from_pretrained(out), ids, 24) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_answered_as_transformers_does(family: str, tmp_path: Path) -> None:
    model, tokenizer = make_folder(tmp_path, family, repetition_penalty=1.3 if family == "qwen2" else None)
    talk = [{"role": "system", "content": "be a drum"}, {"role": "user", "content": QUESTIONS[0]}]
    stop_at_one_of(tmp_path, model, tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    chat = chat_of(tmp_path, system="be a drum")
    talk, ends, streamed = talk[:1], set[str | None](), False
    for question in QUESTIONS:
        talk.append({"role": "user", "content": question})
        ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
        written = theirs(model, ids, 24)
        stopped = written[-1] in (*model.generation_config.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>"))
        answer = tokenizer.decode(written, skip_special_tokens=True)
        if stopped:  # a stop token need not be a special one
            answer = tokenizer.decode(written[:-1], skip_special_tokens=True)
        talk.append({"role": "assistant", "content": answer})
        parts = list(chat.stream(question))
        assert "".join(parts) == answer
        streamed |= len(parts) > 1
        assert chat.stopped == (tokenizer.decode(written[-1:]) if stopped else None)
        assert chat.written == len(written) - stopped
        ends.add(chat.stopped)
    assert [message._asdict() for message in chat.messages] == talk
    assert streamed and ends - {None}  # or this proves less than it says


TURNS = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}END{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_the_template_s_end_of_turn_is_a_stop_even_where_no_setting_says_so(tmp_path: Path) -> None:
    model, tokenizer = make_folder(tmp_path, "llama")
    (tmp_path / "chat_template.jinja").write_text(TURNS.replace("END", "<|end|>"))
    ids = tokenizer(f"<|user|>{QUESTIONS[0]}<|assistant|>", add_special_tokens=False)["input_ids"]
    free, end = theirs(model, ids, 24), tokenizer.convert_tokens_to_ids("<|end|>")
    place, other = next((n, token) for n, token in enumerate(free) if n > 3 and token not in (end, *ids, *free[:n]))
    with torch.no_grad():  # the model that writes the end of a turn where this one writes the other
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight[[other, end]] = weight[[end, other]]
    model.save_pretrained(tmp_path)
    assert theirs(model, ids, 24)[: place + 1] == [*free[:place], end]
    assert len(theirs(model, ids, 24)) == 24  # its settings know of the end of text alone
    chat = chat_of(tmp_path)
    assert chat.ask(QUESTIONS[0]) == tokenizer.decode(free[:place], skip_special_tokens=True)
    assert (chat.stopped, chat.written) == ("<|end|>", place)


def test_text_that_ends_a_turn_ends_the_answer(tmp_path: Path) -> None:
    make_folder(tmp_path, "llama")
    (tmp_path / "chat_template.jinja").write_text(TURNS.replace("END", "#never#"))
    free = chat_of(tmp_path).ask(QUESTIONS[0])
    end = free[4:9]
    assert free.index(end) == 4
    (tmp_path / "chat_template.jinja").write_text(TURNS.replace("END", end))
    chat = chat_of(tmp_path)
    assert "".join(parts := list(chat.stream(QUESTIONS[0]))) == free[:4] and len(parts) > 1
    assert chat.stopped == end and chat.written < 24


def test_a_turn_is_computed_from_where_it_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.model import Decoder

    make_folder(tmp_path, "qwen3")
    chat, sizes, forward = chat_of(tmp_path, tokens=4), list[int](), Decoder.forward

    def counted(self: Decoder, x: torch.Tensor, **options: Any) -> torch.Tensor:
        sizes.append(x.shape[1])
        return forward(self, x, **options)

    monkeypatch.setattr(Decoder, "forward", counted)
    chat.ask(QUESTIONS[0])
    first = sizes[0]
    chat.ask(QUESTIONS[1])
    assert first > 10 and sizes[1:4] == [1, 1, 1] and sizes[4] < first


def test_an_answer_closed_early_is_kept_as_far_as_it_is(tmp_path: Path) -> None:
    make_folder(tmp_path, "llama")
    chat = chat_of(tmp_path)
    parts = chat.stream(QUESTIONS[0])
    begun = next(parts)
    parts.close()
    assert [message.content for message in chat.messages] == [QUESTIONS[0], begun]
    fresh = chat_of(tmp_path)
    fresh.messages = list(chat.messages)
    assert chat.ask(QUESTIONS[1]) == fresh.ask(QUESTIONS[1])


def test_what_cannot_be_answered_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, "gpt2")
    chat = chat_of(tmp_path)
    with pytest.raises(UserError, match=r"the conversation holds the special token <\|end\|>.*; write it differently$"):
        chat.ask("an <|end|> in a text")
    with pytest.raises(UserError, match=r"model\.max_sequence_length = 256, so there is no room"):
        chat.ask("drum " * 300)
    assert chat.messages == []
    (tmp_path / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    )
    with pytest.raises(UserError, match=r"refused by the chat template of .*\(no\); .* or leave out --system"):
        chat_of(tmp_path, system="be a drum").ask("a")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('{"eos_token_id": "end"}', "eos_token_id = 'end' is neither a token's number nor a list of them"),
        ('{"eos_token_id": [1, true]}', "eos_token_id = "),
        ('{"repetition_penalty": 0}', "repetition_penalty = 0 is not a positive number"),
        ("[1]", "holds a list and no table of settings"),
        ("{", "cannot be read"),
    ],
)
def test_damaged_generation_settings_are_named(tmp_path: Path, settings: str, said: str) -> None:
    make_folder(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text(settings)
    with pytest.raises(UserError, match=r"correct it|fix or remove it") as refused:
        generate_from_run(tmp_path, "a", 2, 0, 1.0, 0, "cpu")
    assert said in str(refused.value)


def test_without_settings_the_config_says_where_to_stop(tmp_path: Path) -> None:
    model, tokenizer = make_folder(tmp_path, "qwen3")
    ids = tokenizer("the cloud")["input_ids"]
    stop = stop_at_one_of(tmp_path, model, ids)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": stop}))
    expected = theirs(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), ids, 24)
    assert expected[-1] == stop
    text = "the cloud" + tokenizer.decode(expected[:-1])
    assert generate_from_run(tmp_path, "the cloud", 24, 0, 1.0, 0, "cpu")[0] == text
