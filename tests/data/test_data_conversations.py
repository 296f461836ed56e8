"""Conversations: every common shape, the tokenizer's own template, loss on the assistant's tokens alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from meshwright.data import IGNORE, Corpus, prepare, training_stream
from meshwright.data.tokenizer import train_tokenizer
from meshwright.errors import UserError
from meshwright.job.data import Data

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama 2 has it: turns in pairs, the system's words inside the first, and a complaint where roles do not alternate.
BRACKETS = """{% if messages[0]['role'] == 'system' %}
{% set system = messages[0]['content'] %}{% set messages = messages[1:] %}
{% else %}{% set system = '' %}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + (system + '\n\n' if loop.index0 == 0 and system else '') + message['content'] + ' [/INST]' }}
{% else %}
{{ ' ' }}{% generation %}{{ message['content'] + ' ' + eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}"""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
DIALOGUE = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is naïve?"},
    {"role": "assistant", "content": "Simple."},
    {"role": "user", "content": "And more so?"},
    {"role": "assistant", "content": "Simpler."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as a model's folder has it."""
    path = tmp_path_factory.mktemp("tokenizer")
    inner = tokenizers.Tokenizer.from_str(
        train_tokenizer(["What is naïve and simple? You are brief. " * 30], 320).to_json()
    )
    inner.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIAL])
    inner.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def converse(folder: Path, tmp_path: Path):
    """Prepares records as conversations."""

    def prepared(*records, template: str | None = CHATML, **fields) -> Corpus:
        source = tmp_path / "talk.jsonl"
        source.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
        if template is not None:
            (tmp_path / "template.jinja").write_text(template)
            fields["chat_template"] = str(tmp_path / "template.jinja")
        data = {
            "sources": (str(source),),
            "format": "conversations",
            "tokenizer": str(folder / "tokenizer.json"),
            "cache": str(tmp_path / "cache"),
            "validation_fraction": 0.0,
        }
        return prepare(Data(**data | fields), 400)

    return prepared


def learned(corpus: Corpus) -> str:
    """What the loss counts, as text."""
    tokens, targets = corpus.train.read(0, len(corpus.train)), corpus.train.targets(0, len(corpus.train))
    return corpus.tokenizer.decode(tokens[targets].tolist())


def whole(corpus: Corpus) -> str:
    return corpus.tokenizer.decode(corpus.train.read(0, len(corpus.train)).tolist())


@pytest.mark.parametrize(
    "record",
    [
        {"messages": DIALOGUE},
        {
            "conversations": [
                {"from": m["role"].replace("user", "human").replace("assistant", "gpt"), "value": m["content"]}
                for m in DIALOGUE
            ]
        },
        {"messages": [m | {"content": [{"type": "text", "text": m["content"]}]} for m in DIALOGUE], "id": 7},
        {"prompt": DIALOGUE[:4], "completion": DIALOGUE[4:]},
    ],
    ids=["messages", "conversations", "parts", "prompt and completion"],
)
def test_every_shape_is_the_same_conversation(converse, record):
    corpus = converse(record)
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in DIALOGUE)
    assert whole(corpus) == turns + "<|endoftext|>"
    assert learned(corpus) == "Simple.<|im_end|>\nSimpler.<|im_end|>\n"


def test_instructions_and_plain_prompts(converse):
    corpus = converse({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert whole(corpus).startswith("<|im_start|>user\nAdd.\n\n1 2<|im_end|>") and learned(corpus) == "3<|im_end|>\n"
    plain = converse({"prompt": "1 + 2 =", "completion": " 3"}, template=None)
    assert whole(plain) == "1 + 2 = 3<|endoftext|>" and learned(plain) == " 3<|endoftext|>"


@pytest.mark.parametrize("template", [CHATML, BRACKETS], ids=["chatml", "brackets"])
def test_tokens_are_those_of_transformers(converse, folder: Path, template: str):
    """Ids as apply_chat_template gives them, and its mask of the assistant's where a template tells it."""
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    marked = "endgeneration" in template
    told: Any = theirs.apply_chat_template(
        DIALOGUE, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=marked
    )
    corpus = converse({"messages": DIALOGUE}, template=template)
    tokens = corpus.train.read(0, len(corpus.train)).tolist()
    assert tokens == [*told["input_ids"], corpus.tokenizer.end_of_text]
    if marked:
        assert corpus.train.targets(0, len(tokens)).tolist() == [*map(bool, told["assistant_masks"]), False]
        assert learned(corpus) == "Simple. </s>Simpler. </s>"


@pytest.mark.parametrize("marked", [True, False])
def test_a_space_of_the_template_may_be_of_the_first_answered_token(converse, folder: Path, marked: bool):
    """A template that ends in "assistant: ", and a tokenizer that puts the space into the next word."""
    said = "{% generation %}{{ message['content'] }}{% endgeneration %}" if marked else "{{ message['content'] }}"
    template = (
        "{% for message in messages %}{{ message['role'] + ': ' }}" + said + "{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    asked = [{"role": "user", "content": "naïve?"}, {"role": "assistant", "content": "simple"}]
    corpus = converse({"messages": asked}, template=template)
    assert learned(corpus).lstrip("\n").startswith(" naïve" if marked else " simple")
    assert " simple" in learned(corpus)
    if marked:  # this one marks what the user says as well
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        told: Any = theirs.apply_chat_template(
            asked, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert corpus.train.targets(0, len(corpus.train)).tolist() == [*map(bool, told["assistant_masks"]), False]


def test_the_template_comes_with_the_tokenizer(folder: Path, converse):
    for name, content in (("chat_template.jinja", CHATML), ("tokenizer_config.json", None)):
        path = folder / name
        before = path.read_text() if path.exists() else None
        config = json.loads((folder / "tokenizer_config.json").read_text())
        several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
        path.write_text(content or json.dumps(config | {"chat_template": several}))
        try:
            assert learned(converse({"messages": DIALOGUE}, template=None)).startswith("Simple.<|im_end|>")
        finally:
            path.unlink() if before is None else path.write_text(before)


def test_prompts_carry_no_loss_however_they_are_packed(converse):
    records = [{"messages": [{"role": "user", "content": f"Say {n} simply " * (n % 5 + 1)},
                             {"role": "assistant", "content": f"{n}" * (n % 3 + 1)}]} for n in range(40)]  # fmt: skip
    corpus = converse(*records, mask_documents=True)
    decode = corpus.tokenizer.decode
    for packing in ("concatenate", "best-fit", "none"):
        data = Data(sources=("talk",), packing=packing, mask_documents=True)
        stream = training_stream(corpus, data, 48, seed=0)
        counted = 0
        for window in range(len(stream.parts[0])):
            sample = stream.parts[0].read(window)
            labels = sample.labels_S[sample.labels_S != IGNORE]
            counted += len(labels)
            assert stream.parts[0].count_valid(window) == len(labels)
            # Answers are digits and the end of the turn: nothing of a prompt is among the labels.
            assert set(decode(labels.tolist()).replace("<|im_end|>", "")) <= set("0123456789\n")
        if packing == "best-fit":
            assert counted == int(corpus.train.targets(0, len(corpus.train)).sum())


def message(content="hi", role="assistant"):
    return {"messages": [{"role": "user", "content": "hello"}, {"role": role, "content": content}]}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("record", "match"),
    [
        ('{"messages": [', r"1 broken JSON, first at .*talk\.jsonl:2\)"),
        ("[1]", r"talk\.jsonl:2 \(is a list and not an object\)"),
        ({"text": "words"}, r'has none of "messages", .* \(only text\)'),
        ({"messages": []}, r'has no list of messages in its field "messages"'),
        ({"messages": "hello"}, r'has no list of messages in its field "messages"'),
        ({"messages": [{"content": "hello"}]}, r'has no "role" and "content" in messages\[0\]'),
        (
            message(role="narrator"),
            r"has the role 'narrator' in messages\[1\]; known are system, user, assistant, tool",
        ),
        (message(role=3), r"has the role 3 in messages\[1\]"),
        (message(content=None), r"has a null in messages\[1\] where text is needed"),
        (message(content=[{"type": "image"}]), r"has a list in messages\[1\] where text is needed"),
        (message(content=" "), r"has no word of the assistant's, so there is nothing to learn"),
        (message(role="user"), r"has no word of the assistant's"),
        ({"prompt": 1, "completion": "a"}, r'has no list of messages in its field "prompt"'),
        ({"instruction": "a", "output": 2}, r"has a int in output where text is needed"),
        (message(content="stop <|im_end|> here"), r"holds the special token <\|im_end\|> amid a text"),
        (message(content="\ud800"), r"1 not UTF-8, first at .*talk\.jsonl:2"),
    ],
)
def test_a_bad_conversation_is_named(converse, record, match):
    with pytest.raises(UserError, match=match):
        converse(message(), record)


def test_a_template_that_refuses_says_why(converse):
    with pytest.raises(UserError, match=r"talk\.jsonl:1 \(is refused by the chat template .*\(roles must alternate\)"):
        converse({"messages": [DIALOGUE[2], *DIALOGUE[1:]]}, template=BRACKETS)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"template": None}, r"brings no chat template .*; name a file with one in data\.chat_template"),
        ({"template": None, "chat_template": "gone.jinja"}, r"data\.chat_template = gone\.jinja cannot be read"),
        ({"template": "{% for %}"}, r"template\.jinja: the chat template is broken"),
        ({"template": "{{ messages | length }}"}, r"does not tell where message 1 begins"),
        ({"sources": (__file__,)}, r"\.py is plain text, in which there are no fields; give \.jsonl"),
    ],
)
def test_a_wrong_setting_is_named(converse, fields, match):
    with pytest.raises(UserError, match=match):
        converse({"messages": DIALOGUE[1:3]}, **fields)
