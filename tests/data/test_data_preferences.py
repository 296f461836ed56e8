"""Pairs of answers: every common shape, whole pairs in windows, and files whose format is recognised or refused."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from meshwright.data import IGNORE, Corpus, Loader, lengths_of, prepare, training_stream
from meshwright.data.prepared import Wishes, build
from meshwright.errors import UserError
from meshwright.job.data import Data

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
ASKED = [*TALK, {"role": "user", "content": "One and one?"}]
GOOD, BAD = {"role": "assistant", "content": "Two."}, {"role": "assistant", "content": "Many, surely."}


def written(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def paired(tmp_path: Path):
    """Prepares records as pairs."""

    def prepared(*records: object, template: bool = True, **fields) -> Corpus:
        source = written(tmp_path / "pairs.jsonl", list(records))
        if template:
            (tmp_path / "template.jinja").write_text(TEMPLATE)
            fields["chat_template"] = str(tmp_path / "template.jinja")
        data = {"sources": (str(source),), "format": "preferences", "cache": str(tmp_path / "cache")}
        return prepare(Data(**{**data, "validation_fraction": 0.0, **fields}), 300)

    return prepared


def answers(corpus: Corpus) -> list[tuple[str, str]]:
    """Every document as text, and what of it counts."""
    store = corpus.train
    bounds = [*store.starts_between(0, len(store)).tolist(), len(store)]
    found = []
    for start, stop in pairwise(bounds):
        tokens, targets = store.read(start, stop), store.targets(start, stop)
        found.append((corpus.tokenizer.decode(tokens.tolist()), corpus.tokenizer.decode(tokens[targets].tolist())))
    return found


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD], "score": 3},
        {"prompt": "Hi", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
        {"prompt": ASKED, "chosen": "Two.", "rejected": "Many, surely."},
    ],
    ids=["prompt apart", "prompt in both", "prompt repeated", "answers as texts"],
)
def test_every_shape_is_the_same_pair(paired, record):
    before = "<user>Hi<|endoftext|><assistant>Hello<|endoftext|><user>One and one?<|endoftext|><assistant>"
    assert answers(paired(record)) == [
        (f"{before}Two.<|endoftext|>", "Two.<|endoftext|>"),
        (f"{before}Many, surely.<|endoftext|>", "Many, surely.<|endoftext|>"),
    ]


def test_texts_need_no_template(paired):
    corpus = paired({"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}, template=False)
    assert answers(corpus) == [
        ("1 + 1 = 2<|endoftext|>", " 2<|endoftext|>"),
        ("1 + 1 = 3<|endoftext|>", " 3<|endoftext|>"),
    ]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"prompt": "a", "chosen": "b"}, 'has no "chosen" and "rejected" (only prompt, chosen)'),
        ({"chosen": "b", "rejected": "c"}, 'has texts in "chosen" and "rejected" but no "prompt" before them'),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, 'the same in "chosen" and "rejected"'),
        ({"prompt": "a", "chosen": "b", "rejected": [GOOD]}, 'a text in one of "chosen" and "rejected"'),
        (
            {"chosen": [*TALK, GOOD], "rejected": [{"role": "user", "content": "No"}, BAD]},
            "answers to different prompts",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, 'does not end with words of the assistant\'s in "rejected"'),
        ({"messages": TALK}, 'has no "chosen" and "rejected" (only messages)'),
    ],
)
def test_what_is_no_pair_is_refused_in_one_sentence(paired, record, why):
    with pytest.raises(UserError) as raised:
        paired(record)
    assert why in str(raised.value) and "pairs.jsonl:1" in str(raised.value) and "\n" not in str(raised.value)


def test_pairs_stay_whole_in_windows_whoever_reads_them(paired):
    """Every window holds whole pairs; each is known by where it begins, and workers read what one process reads."""
    records = [{"prompt": f"{n} " * (n % 4 + 1), "chosen": "yes" * (n % 7 + 1), "rejected": "no"} for n in range(40)]
    records.append({"prompt": "long " * 200, "chosen": "yes", "rejected": "no"})
    corpus = paired(*records, template=False)
    data = Data(format="preferences")
    assert data.packing == "best-fit" and data.mask_documents
    stream = training_stream(corpus, data, 96, seed=1)
    [windows] = stream.parts
    starts = corpus.train.starts_between(0, len(corpus.train))
    seen = []
    for number in range(len(windows)):
        sample = windows.read(number)
        assert sample.pairs is not None and sample.valid == windows.count_valid(number) == len(sample.pairs)
        padded = int(sample.length < 96)
        assert len(sample.starts) == 2 * len(sample.pairs) + padded
        for pair, place in zip(sample.pairs, sample.starts[::2], strict=False):
            number = int(np.searchsorted(starts, pair))
            end = starts[number + 1]
            assert np.array_equal(sample.tokens_S[place : place + end - pair], corpus.train.read(pair, end))
            labels = sample.labels_S[place : place + end - pair]
            assert labels[-1] == IGNORE, "the last token of an answer predicts nothing"
            assert np.count_nonzero(labels != IGNORE) == corpus.train.targets(pair, end).sum()
        seen += sample.pairs.tolist()
    assert sorted(seen) == starts[::2][:40].tolist(), "the one too long for a window is left out"
    here, there = (Loader(stream, global_batch=4, workers=workers) for workers in (0, 1))
    try:
        for _ in range(3):
            one, other = next(here), next(there)
            assert one.valid_count == other.valid_count == sum(map(len, one.batch.pairs))
            assert all(map(np.array_equal, one.batch.pairs, other.batch.pairs))
    finally:
        there.close()
    with pytest.raises(UserError, match=r"no pair whose two answers fit together into batch.sequence_length = 4"):
        training_stream(corpus, data, 4, seed=1)


def test_both_answers_fall_to_the_same_split(paired):
    records = [{"prompt": f"{n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(80)]
    corpus = paired(*records, template=False, validation_fraction=0.2)
    held_out = answers(Corpus(corpus.tokenizer, corpus.validation, corpus.train, None))
    assert 2 < len(held_out) < 80
    assert [text.replace("yes", "no") for text, _ in held_out[::2]] == [text for text, _ in held_out[1::2]]


SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
ALPACA = {"instruction": "Greet.", "output": "Hello"}


@pytest.mark.parametrize(
    ("record", "content", "name"),
    [
        ({"messages": TALK}, "conversations", "messages"),
        (SHAREGPT, "conversations", "ShareGPT"),
        (ALPACA, "conversations", "Alpaca"),
        ({"prompt": "a", "completion": "b"}, "conversations", "prompt and completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences", "pairs of texts"),
        ({"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]}, "preferences", "pairs of messages"),
    ],
)
def test_the_format_is_recognised_by_name(tmp_path: Path, record, content, name):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    source = written(tmp_path / "some.jsonl", [record] * 3)
    wishes = Wishes((str(source),), vocab_size=300, content=content, chat_template=tmp_path / "template.jinja")
    manifest = build(wishes, tmp_path / "out")
    assert manifest.formats == {name: 3} and manifest.content == content


@pytest.mark.parametrize("unit_bytes", [None, 400], ids=["one unit", "many units"])
def test_a_file_of_two_formats_is_refused(tmp_path: Path, unit_bytes):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    mixed = written(tmp_path / "mixed.jsonl", [SHAREGPT] * 9 + [ALPACA] * 9)
    wishes = Wishes((str(mixed),), vocab_size=300, content="conversations", chat_template=tmp_path / "template.jinja")
    with pytest.raises(UserError, match=r"mixed\.jsonl mixes two formats, ShareGPT .*Alpaca.*; give each a file"):
        build(wishes, tmp_path / "out", 1, unit_bytes=unit_bytes)
    assert not (tmp_path / "out" / "manifest.json").exists()
    apart = [written(tmp_path / "one.jsonl", [SHAREGPT]), written(tmp_path / "other.jsonl", [ALPACA])]
    two = Wishes(tuple(map(str, apart)), vocab_size=300, content="conversations", chat_template=wishes.chat_template)
    assert build(two, tmp_path / "two").formats == {"Alpaca": 1, "ShareGPT": 1}


def test_pairs_are_named_where_something_else_was_expected(tmp_path: Path):
    source = str(written(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}]))
    for content in ("text", "conversations"):
        with pytest.raises(UserError, match=r'data\.format = "preferences"'):
            build(Wishes((source,), vocab_size=300, content=content), tmp_path / content)


def test_lengths_are_told_before_training(paired):
    digits = [" ".join(str((7 * n + 3 * i * i) % 10) for i in range(n + 1)) for n in range(100)]
    corpus = paired(*({"prompt": "a", "chosen": answer, "rejected": "c"} for answer in digits), template=False)
    data = Data(format="preferences")
    starts = [*corpus.train.starts_between(0, len(corpus.train))[::2].tolist(), len(corpus.train)]
    lengths = sorted(stop - start for start, stop in pairwise(starts))
    found = lengths_of(corpus, data, lengths[89])
    assert found is not None and found.count == 100 and found.longest == lengths[-1] and found.half == lengths[50]
    assert found.too_long == sum(length > lengths[89] for length in lengths) > 0
    assert f"{found.too_long} ({found.too_long}.0%) are longer than" in found.sentence(lengths[89])
    assert "left out" in found.sentence(lengths[89]) and lengths_of(corpus, Data(), 64) is None
