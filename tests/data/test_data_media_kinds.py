"""Sound, film, one's own encoder, and Energon's folders."""

import itertools
import json
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from data_media import IMAGE, captioned, colour, film, picture, tone, write_tar

from meshwright.data import Loader, prepare, training_stream
from meshwright.data.media.chance import Chance
from meshwright.data.media.film import frames_of, sampled_numbers
from meshwright.data.media.sound import log_mel, windows_of
from meshwright.data.prepared import Wishes, export_webdataset
from meshwright.errors import UserError
from meshwright.job.data import Data
from meshwright.job.fields import MediaField

SOUND = {"kind": "audio", "tokens": 5, "rate": 8000, "mels": 20, "seconds": 0.5, "windows": 4}


def batch_of(tmp_path, *sources, sequence_length=64, batch=8, **changes):
    data = Data(sources=sources, cache=str(tmp_path / "cache"), **{"validation_fraction": 0.0, **changes})
    corpus = prepare(data, 300)
    loader = Loader(training_stream(corpus, data, sequence_length, 0), global_batch=batch)
    return next(iter(loader)).batch, corpus


def test_sound_becomes_windows_of_features(tmp_path):
    lengths = [0.4, 0.6, 1.2, 9.0]
    samples = [(f"{n}", {"wav": tone(400 + 300 * n, lengths[n]), "txt": f"tone {n}".encode()}) for n in range(4)]
    source = write_tar(tmp_path / "a.tar", samples)
    batch, corpus = batch_of(tmp_path, source, fields={"sound": SOUND}, packing="none", batch=4)
    assert sorted(corpus.train_items.places_and_counts()[1].tolist()) == [1, 2, 3, 4]  # the last is cut to four windows
    assert batch.media.items_BK.shape == (4, 64 // 5, 20, 50)
    filled = batch.media.places_BKT[..., 0] >= 0
    loudest = {int(batch.media.items_BK[row, 0].mean(1).argmax()) for row in range(4)}
    assert len(loudest) == 4 and int(filled.sum()) == 10


def test_features_equal_whispers():
    extractor = pytest.importorskip("transformers").WhisperFeatureExtractor(feature_size=80, chunk_length=2)
    wave = np.random.default_rng(0).normal(0, 0.1, 32000).astype(np.float32)
    theirs = extractor(wave, sampling_rate=16000, return_tensors="np").input_features[0]
    ours = log_mel(torch.from_numpy(wave)[None], 16000, 80)[0].numpy()
    assert ours.shape == theirs.shape and np.abs(ours - theirs).max() < 1e-4


def test_sound_is_resampled():
    field = MediaField(kind="audio", tokens=1, rate=16000, mels=40, seconds=1.0)
    slow, fast = (windows_of(tone(1000, 1.0, rate), field)[0] for rate in (8000, 16000))
    assert slow.shape == fast.shape == (40, 100)
    inner = slice(5, 95)
    assert (slow[:, inner].mean(1).argmax(), fast[:, inner].mean(1).argmax()) == (slow[:, inner].mean(1).argmax(),) * 2
    assert np.abs(slow[:12, inner] - fast[:12, inner]).max() < 0.05


def test_frames_of_a_film_are_at_equal_distances():
    field = MediaField(kind="video", tokens=1, size=8, frames=4)
    items = frames_of(film(range(20)), field, Chance(None))
    assert sampled_numbers(20, 4) == [2, 7, 12, 17]
    for item, number in zip(items, [2, 7, 12, 17], strict=True):
        assert np.abs(item.mean((1, 2)) - colour(number)).max() < 1.5
    few = frames_of(film([5, 6]), field, Chance(None))
    assert [int(np.abs(item.mean((1, 2)) - colour(6)).max() < 1.5) for item in few] == [0, 0, 1, 1]


def test_films_and_pictures_in_one_sample(tmp_path):
    samples = [
        (f"{n}", {"mkv": film([n] * 6), "jpg": picture(n), "txt": b"still <image> moving <video> end"})
        for n in range(4)
    ]
    source = write_tar(tmp_path / "a.tar", samples)
    fields = {"image": IMAGE, "video": {**IMAGE, "kind": "video", "frames": 3}}
    batch, _ = batch_of(tmp_path, source, fields=fields, packing="none", batch=4)
    for row in range(4):
        filled = batch.media.places_BKT[row, :, 0] >= 0
        assert int(filled.sum()) == 4  # a picture and three frames
        pixels = (batch.media.items_BK[row][filled] * 0.5 + 0.5) * 255
        assert (pixels - pixels[:1]).abs().max() < 5


def test_damaged_film_and_sound_are_named(tmp_path):
    whole = film(range(30))
    samples = [(f"v{n}", {"mkv": whole, "txt": b"film"}) for n in range(18)]
    samples += [("cut", {"mkv": whole[:400], "txt": b"film"}), ("none", {"mkv": b"", "txt": b"film"})]
    source = write_tar(tmp_path / "a.tar", samples)
    with pytest.raises(UserError, match=r"2 of 20 .*video damaged, first at .*cut\.mkv.*video of no bytes"):
        batch_of(tmp_path, source, fields={"video": {**IMAGE, "kind": "video", "frames": 2}})
    sounds = [("a", {"wav": b"RIFF nonsense", "txt": b"sound"}), ("b", {"wav": tone(500), "txt": b"sound"})]
    with pytest.raises(UserError, match=r"sound of unknown content, first at .*a\.wav"):
        batch_of(tmp_path, write_tar(tmp_path / "b.tar", sounds), fields={"sound": SOUND})


ENCODER = """
import numpy as np

class Encoder:
    def cook(self, record):
        return {"text": f"<image> says {record['label']['name']}"}

    def items(self, field, raw, random):
        return np.full((1, 3, 16, 16), len(raw) + random.draw(), np.float32)
"""


def test_ones_own_encoder(tmp_path):
    (tmp_path / "own.py").write_text(ENCODER)
    samples = [(f"{n}", {"jpg": picture(n), "label.json": json.dumps({"name": f"n{n}"}).encode()}) for n in range(8)]
    samples = [(key, {"jpg": m["jpg"], "json": b'{"label": ' + m["label.json"] + b"}"}) for key, m in samples]
    source = write_tar(tmp_path / "a.tar", samples)
    how = {"fields": {"image": IMAGE}, "encoder": f"{tmp_path / 'own.py'}:Encoder", "packing": "none"}
    batch, corpus = batch_of(tmp_path, source, **how)
    again, _ = batch_of(tmp_path, source, **how)
    assert torch.equal(batch.media.items_BK, again.media.items_BK)
    sizes = {float(item.flatten()[0]) // 1 for item in batch.media.items_BK[:, 0]}
    assert sizes <= {float(len(picture(n))) for n in range(8)}
    length = batch.lengths[0]
    assert corpus.tokenizer.decode(batch.tokens_BS[0, IMAGE["tokens"] : length - 1].tolist()).startswith(" says n")
    (tmp_path / "own.py").write_text(ENCODER.replace("16, 16", "8, 8"))
    with pytest.raises(UserError, match=r"items returns \(1, 3, 8, 8\) for image; return items × \(3, 16, 16\)"):
        batch_of(tmp_path, source, **how)
    for named, words in (
        (f"{tmp_path}/none.py:Encoder", "is no file and class"),
        (f"{tmp_path}/own.py:Wrong", "cannot be loaded"),
    ):
        with pytest.raises(UserError, match=words):
            batch_of(tmp_path, source, fields={"image": IMAGE}, encoder=named)


def energon(folder, kind="CaptioningSample", fields="image: jpg\n  caption: txt", exclude="[]"):
    """A folder as `energon prepare` leaves it, checked against the real one by benchmarks/energon_folders.py."""
    for part in range(3):
        write_tar(folder / f"shard-{part:03}.tar", captioned(range(10 * part, 10 * part + 10)))
    meta = folder / ".nv-meta"
    meta.mkdir()
    counts = {f"shard-{part:03}.tar": 10 for part in range(3)}
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    parts = "split_parts:\n  train:\n  - shard-{000..001}.tar\n  val:\n  - shard-002.tar\n"
    (meta / "split.yaml").write_text(f"{parts}exclude: {exclude}\n")
    described = f"sample_type:\n  __module__: megatron.energon\n  __class__: {kind}\nfield_map:\n  {fields}\n"
    (meta / "dataset.yaml").write_text(described)
    return str(folder)


def texts_of(corpus) -> set[str]:
    return set(
        filter(None, corpus.tokenizer.decode(corpus.train.read(0, len(corpus.train)).tolist()).split("<|endoftext|>"))
    )


def test_energons_folders_are_read_as_they_are(tmp_path):
    _, corpus = batch_of(tmp_path, energon(tmp_path / "en"), fields={"image": IMAGE})
    assert texts_of(corpus) == {f"this is the picture {n}" for n in range(20)}
    _, corpus = batch_of(tmp_path, energon(tmp_path / "out", exclude="[shard-001.tar]"), fields={"image": IMAGE})
    assert len(texts_of(corpus)) == 10
    with pytest.raises(UserError, match="samples of type OCRSample, which Meshwright does not run"):
        batch_of(tmp_path, energon(tmp_path / "ocr", kind="OCRSample"), fields={"image": IMAGE})
    with pytest.raises(UserError, match="excluding single samples is not supported"):
        batch_of(tmp_path, energon(tmp_path / "one", exclude="[shard-001.tar/000012]"), fields={"image": IMAGE})


def test_questions_of_energons_folders(tmp_path):
    folder = tmp_path / "vqa"
    energon(folder, kind="VQASample", fields="image: jpg\n  context: json[question]\n  answers: json[answers]")
    for part in range(3):
        asked = [
            (
                f"{n}",
                {
                    "jpg": picture(n),
                    "json": json.dumps({"question": f"which {n}?", "answers": [f"it is {n}"]}).encode(),
                },
            )
            for n in range(part * 10, part * 10 + 10)
        ]
        write_tar(folder / f"shard-{part:03}.tar", asked)
    batch, corpus = batch_of(tmp_path, str(folder), fields={"image": IMAGE}, format="conversations", packing="none")
    labels = batch.labels_BS[0]
    told = corpus.tokenizer.decode(labels[labels >= 0].tolist()).split("<|")[0]
    assert told.startswith("it is ") and "which" in corpus.tokenizer.decode(batch.tokens_BS[0].tolist())


def test_missing_decoders_are_named(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "av", None)
    source = write_tar(tmp_path / "a.tar", [("a", {"wav": tone(500), "txt": b"sound"})])
    with pytest.raises(UserError, match=r'data\.fields\.sound of kind "audio" needs av, .*meshwright\[media\]'):
        batch_of(tmp_path, source, fields={"sound": SOUND})


def test_steps_are_read_by_their_position(tmp_path):
    source = write_tar(
        tmp_path / "a.tar", [(f"{n}", {"wav": tone(300 + 50 * n), "txt": f"tone {n}".encode()}) for n in range(12)]
    )
    data = Data(sources=(source,), fields={"sound": SOUND}, cache=str(tmp_path / "cache"), validation_fraction=0.0)
    stream = training_stream(prepare(data, 300), data, 64, 0)
    whole = [step.batch for step in itertools.islice(Loader(stream, global_batch=2), 4)]
    later = next(iter(Loader(stream, global_batch=2, position=6))).batch
    assert torch.equal(whole[3].media.items_BK, later.media.items_BK)


def test_samples_written_for_energon_are_read_again(tmp_path):
    for n in range(30):
        (tmp_path / f"{n}.png").write_bytes(picture(n, "PNG"))
    lines = [{"image": f"{n}.png", "text": f"this is the picture {n}"} for n in range(30)]
    lines[4]["image"] = "missing.png"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = Data(sources=("a",), fields={"image": IMAGE}).fields
    wishes = Wishes((str(tmp_path / "a.jsonl"),), fields=fields, validation_fraction=0.2)
    written = export_webdataset(wishes, tmp_path / "out", shard_bytes=8000)
    assert sum(written.samples.values()) == 29 and written.samples["val"] > 0 and written.shards > 3
    assert written.bad.told()["image without its file"]["count"] == 1
    _, corpus = batch_of(tmp_path, str(tmp_path / "out"), fields={"image": IMAGE})
    assert len(texts_of(corpus)) == written.samples["train"]
    assert texts_of(corpus) <= {f"this is the picture {n}" for n in range(30)}
    # The table of offsets says where every sample begins.
    name = next(iter(sorted((tmp_path / "out").glob("train-*.tar"))))
    offsets = np.frombuffer(name.with_name(f"{name.name}.idx").read_bytes(), "<u8")
    with tarfile.open(name) as archive:
        begins = [member.offset for member in archive.getmembers() if member.name.endswith("png")]
    assert offsets[:-1].tolist() == begins
    with pytest.raises(UserError, match="exists; choose another"):
        export_webdataset(wishes, tmp_path / "out")
    with pytest.raises(UserError, match=r"without its file, first at .*missing\.png.*--max-bad 0\.01"):
        export_webdataset(replace(wishes, max_bad=0.01), tmp_path / "other")
    assert not (tmp_path / "other").exists()
