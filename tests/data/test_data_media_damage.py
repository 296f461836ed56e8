"""Damaged pictures: named, counted, left out or refused by policy, with bounded memory."""

import itertools
import resource
from pathlib import Path

import pytest
import torch
from data_media import IMAGE, captioned, huge_png, noise, picture, write_tar

from meshwright.data import Loader, prepare, training_stream
from meshwright.data.prepared import Wishes, build, open_prepared
from meshwright.errors import UserError
from meshwright.job.data import Data

BAD = 50
KINDS = {
    "image damaged": 10,
    "image of no bytes": 10,
    "image of unknown content": 10,
    "image too large": 20,
}


def damaged(number: int) -> bytes:
    """One of five ways in which a picture can be damaged."""
    whole = noise(number)
    return [
        whole[: len(whole) // 2],  # cut short
        b"",
        b"this is a text under the name of a picture " * 3,  # the wrong ending
        huge_png(60_000, 50_000),  # dimensions that no memory holds
        huge_png(12_000, 12_000),  # a small file that unpacks to 144 million pixels
    ][number % 5]


@pytest.fixture(scope="module")
def thousand(tmp_path_factory) -> str:
    """A thousand samples, one in twenty of them damaged."""
    bombs = [damaged(kind) for kind in range(5)]
    samples = captioned(range(1000), noise)
    for number in range(BAD):
        key, members = samples[number * 20]
        samples[number * 20] = (key, {**members, "jpg": bombs[number % 5]})
    return write_tar(tmp_path_factory.mktemp("thousand") / "a.tar", samples)


def data_of(folder: Path, source: str, **changes) -> Data:
    fields = {"sources": (source,), "fields": {"image": IMAGE}, "cache": str(folder / "cache"), **changes}
    return Data(**{"validation_fraction": 0.0, **fields})


def largest_kib() -> int:
    """The most memory that this process, or one that it has waited for, had at once."""
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@pytest.mark.thorough
def test_damaged_pictures_are_named_counted_and_left_out(tmp_path, thousand):
    data = data_of(tmp_path, thousand)
    wishes = Wishes((thousand,), vocab_size=300, fields=data.fields, validation_fraction=0.0, max_bad=0.05)
    before = largest_kib()
    manifest = build(wishes, tmp_path / "out", 1)
    assert {kind: entry["count"] for kind, entry in manifest.bad.items()} == KINDS
    assert manifest.documents["train"] == 1000 - BAD
    first = manifest.bad["image damaged"]["first"][0]
    assert first.startswith(f"{thousand}:000000.jpg (") and "truncated" in first
    assert "12000 × 12000 pixels, more than max_pixels" in str(manifest.bad["image too large"]["first"])
    assert len(open_prepared(tmp_path / "out").items("train").places_and_counts()[0]) == 1000 - BAD
    # None of it took the memory of the pictures it claims to be.
    assert largest_kib() - before < 300 << 10  # one such picture has 412 MiB of pixels


def test_too_many_damaged_pictures_are_refused(tmp_path, thousand):
    fields = data_of(tmp_path, thousand).fields
    wishes = Wishes((thousand,), vocab_size=300, fields=fields, max_bad=0.04, validation_fraction=0.0)
    with pytest.raises(
        UserError, match=r"\d+ of \d+ documents cannot be used \(.*image damaged, first at .*--max-bad 0.04"
    ):
        build(wishes, tmp_path / "out", 1)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_damaged_later_is_refused_or_empty(tmp_path, workers):
    for number in range(12):
        (tmp_path / f"{number}.png").write_bytes(picture(number + 1, "PNG"))
    lines = [f'{{"image": "{n}.png", "text": "picture {n}"}}\n' for n in range(12)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    data = data_of(tmp_path, str(tmp_path / "a.jsonl"), packing="none")
    corpus = prepare(data, 300)
    whole = (tmp_path / "5.png").read_bytes()
    (tmp_path / "5.png").write_bytes(whole[:40])
    (tmp_path / "7.png").unlink()

    def steps(data):
        loader = Loader(training_stream(corpus, data, 64, 0), global_batch=12, workers=workers)
        told = []
        loader.readers.on_slow = told.append
        try:
            return list(itertools.islice(loader, 1)), told, loader.lost_items
        finally:
            loader.close()

    with pytest.raises(UserError, match=r'[57]\.png cannot be decoded .*data\.damaged = "blank"'):
        steps(data)
    (step,), told, lost = steps(data.model_copy(update={"damaged": "blank"}))
    assert lost == 2 and len(told) == 2 and any("5.png" in line for line in told)
    filled = step.batch.media.places_BKT[..., 0] >= 0
    grey = (step.batch.media.items_BK[filled] + 1).abs().amax((1, 2, 3)) < 1e-6
    assert int(grey.sum()) == 2


def test_headers_alone_find_less(tmp_path):
    samples = captioned(range(40), noise)
    samples[0] = ("0", {"jpg": damaged(0), "txt": b"cut short"})
    samples[1] = ("1", {"jpg": b"", "txt": b"empty"})
    source = write_tar(tmp_path / "a.tar", samples)
    found = {}
    for check in ("decode", "header"):
        wishes = Wishes((source,), vocab_size=300, fields=data_of(tmp_path, source).fields, check=check, max_bad=0.1)
        found[check] = set(build(wishes, tmp_path / check, 1).bad)
    assert found == {"decode": {"image damaged", "image of no bytes"}, "header": {"image of no bytes"}}


def test_a_damaged_table_of_items_is_refused(tmp_path):
    source = write_tar(tmp_path / "a.tar", captioned(range(30)))
    data = data_of(tmp_path, source)
    corpus = prepare(data, 300)
    table = next(corpus.folder.glob("train-*.items.npy"))
    raw = bytearray(table.read_bytes())
    raw[-16:-8] = (1 << 40).to_bytes(8, "little")  # the size of the last item
    table.write_bytes(raw)
    again = prepare(data, 300)
    with pytest.raises(UserError, match="so it is damaged; prepare it again"):
        for batch in itertools.islice(Loader(training_stream(again, data, 64, 0), global_batch=4), 3):
            torch.stack([batch.batch.tokens_BS])
