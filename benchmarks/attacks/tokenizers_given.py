"""Third-party tokenizers, their tokenizer.json and settings mutated, then used."""

import functools
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from attacks.archives import TEXTS
from attacks.case import Case, Family
from attacks.damage import damaged, damaged_value

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@functools.cache
def whole() -> dict[str, str]:
    """The files of a real tokenizer."""
    from meshwright.data.tokenizer import train_tokenizer

    told = json.loads(train_tokenizer(TEXTS, 290).to_json())
    for place, name in enumerate(("<|im_start|>", "<|im_end|>")):
        token = {**told["added_tokens"][0], "content": name, "id": len(told["model"]["vocab"]) + place}
        told["added_tokens"].append(token)
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}
    return {
        "tokenizer.json": json.dumps(told),
        "tokenizer_config.json": json.dumps(config),
        "chat_template.jinja": CHATML,
    }


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of mutations."""
    for number in range(1 << 62):
        yield Case(f"{number}", partial(_run, f"{number} {chance.random()}"))


def _run(seed: str, folder: Path) -> None:
    from meshwright.data.chat import load_chat_template
    from meshwright.data.raw import Taking
    from meshwright.data.tokenizer import load_tokenizer

    chance = random.Random(seed)
    hit = chance.choice(["tokenizer.json"] * 4 + list(whole()))
    for name, text in whole().items():
        raw = text.encode()
        if name == hit and name.endswith("json") and chance.random() < 0.75:
            raw = json.dumps(damaged_value(json.loads(text), chance)).encode()
        elif name == hit:
            raw = damaged(raw, chance)
        if name != "chat_template.jinja" or chance.random() < 0.5:
            (folder / name).write_bytes(raw)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    for text in (TEXTS[0], "<|endoftext|><|im_end|>", "\0é\U0010ffff", ""):
        tokens = tokenizer.encode(text)
        assert tokenizer.end_of_text not in tokens and max(tokens, default=0) < tokenizer.vocab_size
        tokenizer.decode(tokens)
    tokenizer.encode_batch(TEXTS)
    tokenizer.byte_lengths()
    if chance.random() < 0.3:
        taking = Taking(chat=load_chat_template(folder / "tokenizer.json", None))
        item = taking.from_record({"prompt": [{"role": "user", "content": "hi"}], "completion": "yes"}, "talk:1")
        if hasattr(item, "text"):
            tokenizer.encode_marked([item.text], [item.marks])


TOKENIZERS = Family("tokenizers", draw)
