"""A real prepared folder, its files mutated one at a time, then inspected, verified and trained from."""

import atexit
import functools
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from attacks.archives import TEXTS
from attacks.case import Case, Family, command
from attacks.damage import damaged, damaged_value


@functools.cache
def whole() -> Path:
    """A prepared folder and next to it a cache of a job's own preparation; created once per process."""
    from meshwright.data import prepare
    from meshwright.data.prepared import Wishes, build
    from meshwright.data.tokenizer import train_tokenizer
    from meshwright.job.data import Data

    folder = Path(tempfile.mkdtemp(prefix="attack-template-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    train_tokenizer(TEXTS, 300).save(folder / "tokenizer.json")
    wishes = Wishes((str(folder / "a.jsonl"),), folder / "tokenizer.json", validation_fraction=0.1)
    build(wishes, folder / "prepared", 1, unit_bytes=2000)
    prepare(Data(sources=(str(folder / "a.jsonl"),), cache=str(folder / "cache")), 300)
    read(folder / "prepared", "best-fit")
    return folder


def read(folder: Path, packing: str) -> None:
    """Every window, as training reads them."""
    from meshwright.data import prepare, training_stream, validation_windows
    from meshwright.job.data import Data

    data = Data(sources=(str(folder),), mask_documents=True, packing=packing, cache=str(folder.parent / "cache"))
    corpus = prepare(data, 300)
    if len(corpus.train) < 200_000:
        for windows in (training_stream(corpus, data, 16, seed=0).parts[0], validation_windows(corpus, data, 16)):
            for window in range(len(windows)):
                windows.read(window)
                windows.count_valid(window)


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of mutations."""
    whole()
    for number in range(1 << 62):
        seed = f"{number} {chance.random()}"
        yield Case(f"{number}", partial(_run, seed))


def _run(seed: str, folder: Path) -> None:
    chance = random.Random(seed)
    place = Path(shutil.copytree(whole() / "prepared", folder / "prepared"))
    files = sorted(path for path in place.iterdir() if path.is_file())
    if chance.random() < 0.3:
        files = [place / "manifest.json"]
    for path in chance.sample(files, min(len(files), chance.randint(1, 2))):
        if path.suffix == ".json" and chance.random() < 0.7:
            path.write_text(json.dumps(damaged_value(json.loads(path.read_text()), chance)))
        elif chance.random() < 0.1:
            path.unlink()
        else:
            path.write_bytes(damaged(path.read_bytes(), chance))
    kind = chance.randrange(5)
    if kind == 0:
        command("data", "inspect", str(place), "--sample", "2")
    elif kind == 1:
        command("data", "verify", str(place))
    else:
        read(place, "best-fit" if kind == 2 else "concatenate")


PREPARED_DATA = Family("prepared data", draw)
