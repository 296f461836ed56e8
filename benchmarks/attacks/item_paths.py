"""Paths of pictures in records: out of their folder, through links and loops of links, with odd characters."""

import json
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from attacks.case import Case, Family, Refused

FOLDERS = [
    "plain",
    "in:ner",
    "s3:",
    "a b",
    "c:d:e",
    "~",
    "-x",
    "new\nline",
    "..hidden",
    "http:",
    "x.tar",
    "%2e%2e",
    "ü",
]
NAMES = ["good.png", "./good.png", "sub/../good.png", "link.png", "sub/good.png"]
NAMES += ["../secret.png", "sub/../../secret.png", "out/secret.png", "out.png", "deep/../secret.png", "loop.png"]
NAMES += ["loop.png/../../secret.png", "ring/x.png", "a\0.png", "good.png\0", "\ud800.png", "\udcff.png", "x" * 5000]
NAMES += ["x/" * 3000, "", " ", ".", "..", "/etc/passwd", "/dev/zero", "/proc/self/mem", "~/secret.png", "pipe.png"]
NAMES += ["file:///etc/passwd", "s3://x/y.png", "http://127.0.0.1:1/x.png", "good.png/x", "{folder}/../secret.png"]


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of folders with records."""
    for number in range(1 << 62):
        yield Case(f"{number}", partial(_run, f"{number} {chance.random()}"))


def _run(seed: str, folder: Path) -> None:
    from meshwright.data.media.examine import Examiner
    from meshwright.data.media.take import media_taking
    from meshwright.data.raw import Bad, Taking, list_inputs, plan_units, read_unit
    from meshwright.job.data import Data

    chance = random.Random(seed)
    inner = _folder(chance, folder)
    source = _source(chance, inner)
    fields = Data(fields={"image": {"kind": "image", "size": 16, "tokens": 1}}).fields
    taking = media_taking(Taking(), fields, None, "decode", [str(source)])
    inputs = list_inputs([str(source)]).files
    examiner = Examiner(taking, [file.name for file in inputs])
    wrong: list[str] = []
    for unit in plan_units(inputs):
        for item in read_unit(unit, taking):
            looked = item if isinstance(item, Bad) else examiner.look(item)
            if isinstance(looked, Bad):
                wrong.append(f"{looked.kind}: {looked.place}")
                continue
            for medium in looked.media:
                target = os.path.realpath(medium.name)
                assert target.startswith(f"{inner.resolve()}{os.sep}"), f"{medium.name} outside {inner} was read"
    if wrong:
        raise Refused(wrong[0])


def _folder(chance: random.Random, folder: Path) -> Path:
    """A folder with a picture, beside a secret one, with links of every kind."""
    from PIL import Image

    inner = folder / chance.choice(FOLDERS)
    (inner / "sub").mkdir(parents=True)
    (inner / "deep").symlink_to("..")
    for path in (folder / "secret.png", inner / "good.png", inner / "sub" / "good.png"):
        Image.new("RGB", (16, 16)).save(path)
    links = {
        "link.png": "good.png",
        "loop.png": "loop.png",
        "out.png": "../secret.png",
        "out": "..",
        "ring": "ring/ring",
    }
    for name, target in links.items():
        (inner / name).symlink_to(target)
    os.mkfifo(inner / "pipe.png")
    return inner


def _source(chance: random.Random, inner: Path) -> Path:
    """Records that name pictures, or texts with pictures beside them."""
    kind = chance.choice(["jsonl", "jsonl", "parquet", "texts"])
    if kind == "texts":
        (texts := inner / "texts").mkdir()
        for number, target in enumerate(chance.choices(["../good.png", "../../secret.png", "0.png", "nowhere"], k=2)):
            (texts / f"{number}.txt").write_text("a picture")
            (texts / f"{number}.png").symlink_to(target)
        return texts
    names = [name.replace("{folder}", str(inner)) for name in chance.choices(NAMES, k=chance.randint(1, 4))]
    records = [{"text": "a picture", "image": chance.choice([name, [name], {"path": name}])} for name in names]
    if kind == "jsonl":
        (inner / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
        return inner / "a.jsonl"
    raw = pa.array([name.encode("utf-8", "surrogatepass") for name in names], pa.binary())
    pq.write_table(pa.table({"text": ["a picture"] * len(names), "image": raw.view(pa.string())}), inner / "a.parquet")
    return inner / "a.parquet"


ITEM_PATHS = Family("paths of items", draw, weight=0.4)
