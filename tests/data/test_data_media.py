"""Samples with pictures: the text loader's promises hold for them, from every kind of source."""

import itertools
import json

import numpy as np
import pytest
import torch
from data_media import IMAGE, T, captioned, colour, noise, picture, write_tar

from meshwright.data import IGNORE, Loader, prepare, training_stream, validation_batches, validation_windows
from meshwright.data.prepared import Wishes, build
from meshwright.errors import UserError
from meshwright.job.data import Data

S = 64


def data_of(tmp_path, *sources, **fields) -> Data:
    return Data(
        **{
            "sources": sources,
            "fields": {"image": IMAGE},
            "cache": str(tmp_path / "cache"),
            "validation_fraction": 0.0,
            **fields,
        }
    )


def stream_of(data, seed=3):
    return training_stream(prepare(data, 300), data, S, seed)


def batches(stream, steps, **how):
    loader = Loader(stream, global_batch=4, **how)
    try:
        return [step.batch for step in itertools.islice(loader, steps)]
    finally:
        loader.close()


def pairs(batch, tokenizer) -> set[tuple[str, tuple[int, ...]]]:
    """Every caption of a batch with the colour of the picture before it."""
    found = set()
    for row, (tokens, places) in enumerate(zip(batch.tokens_BS, batch.media.places_BKT, strict=True)):
        for slot, place in enumerate(places.tolist()):
            if place[0] < 0:
                continue
            assert place == list(range(place[0], place[0] + T))
            text = tokens[place[-1] + 1 :].tolist()
            text = text[: text.index(tokenizer.end_of_text)]
            pixels = (batch.media.items_BK[row, slot] * 0.5 + 0.5) * 255
            assert (pixels.amax((1, 2)) - pixels.amin((1, 2))).max() < 3
            found.add((tokenizer.decode(text), tuple(pixels.mean((1, 2)).round().int().tolist())))
    return found


def near(found, numbers, text="this is the picture {}") -> bool:
    """Whether captions and colours are those of the numbers, up to what JPEG loses."""
    told = dict(found)
    return told.keys() == {text.format(n) for n in numbers} and all(
        max(abs(a - b) for a, b in zip(told[text.format(n)], colour(n), strict=True)) <= 3 for n in numbers
    )


def all_pairs(data):
    corpus = prepare(data, 300)
    stream = training_stream(corpus, data, S, 1)
    steps = -(-len(stream.parts[0]) // 4)
    return {pair for batch in batches(stream, steps) for pair in pairs(batch, corpus.tokenizer)}


def test_pictures_and_captions_of_a_tar_arrive_together(tmp_path):
    source = write_tar(tmp_path / "a.tar", captioned(range(30)))
    data = data_of(tmp_path, source)
    assert near(all_pairs(data), range(30))
    batch = batches(stream_of(data), 1)[0]
    assert batch.media.items_BK.shape == (4, S // T, 3, 16, 16)
    assert batch.document_ids_BS is not None
    # No placeholder is a label; the word after one is.
    for labels, places in zip(batch.labels_BS, batch.media.places_BKT, strict=True):
        filled = places[places[:, 0] >= 0]
        assert (labels[filled[:, :-1]] == IGNORE).all() and (labels[filled[:, -1]] != IGNORE).all()


def test_the_bytes_stay_in_the_tar(tmp_path):
    source = write_tar(tmp_path / "a.tar", captioned(range(30), noise))
    corpus = prepare(data_of(tmp_path, source), 300)
    copied = [path.stat().st_size for path in corpus.folder.glob("*.media.bin")]
    assert copied and sum(copied) == 0


def test_one_stream_whatever_the_ranks_and_workers(tmp_path):
    sources = [
        write_tar(tmp_path / f"{part}.tar", captioned(range(40 * part, 40 * part + 40), noise)) for part in (0, 1)
    ]
    field = {**IMAGE, "crop": "random", "flip": True}
    data = data_of(tmp_path, *sources, fields={"image": field}, weights=(3, 1), items_per_sequence=3)
    stream = stream_of(data)
    alone = batches(stream, 8, workers=0)
    for workers in (1, 3):
        for one, other in zip(alone, batches(stream, 8, workers=workers), strict=True):
            assert torch.equal(one.media.items_BK, other.media.items_BK)
            assert torch.equal(one.media.places_BKT, other.media.places_BKT)
            assert torch.equal(one.tokens_BS, other.tokens_BS)
    # Resumed at a sample on another number of ranks.
    parts = [batches(stream, 6, workers=2, rank=rank, ranks=2, position=8) for rank in range(2)]
    for step, (first, second) in enumerate(zip(*parts, strict=True)):
        items = torch.cat([first.media.items_BK, second.media.items_BK])
        assert torch.equal(items, alone[2 + step].media.items_BK)
    # The same picture is cut differently the next time, and differently with another seed.
    other = batches(stream_of(data, seed=4), 8)
    assert not torch.equal(alone[0].media.items_BK, other[0].media.items_BK)
    by_window = {}
    for number in range(len(stream.parts[0]) * 2):
        part, window = stream.place(number)
        by_window.setdefault((part, window), []).append(stream.read(number))
    twice = next(samples for samples in by_window.values() if len(samples) > 1)
    rooms = [np.zeros((3, 3, 16, 16), np.uint8) for _ in twice]
    for sample, room in zip(twice, rooms, strict=True):
        sample.media.fill(room)
    assert not np.array_equal(rooms[0], rooms[1])


def test_validation_is_cut_in_the_middle_every_time(tmp_path):
    source = write_tar(tmp_path / "a.tar", captioned(range(60), noise))
    field = {**IMAGE, "crop": "random", "flip": True}
    data = data_of(tmp_path, source, fields={"image": field}, validation_fraction=0.3)
    corpus = prepare(data, 300)
    first, again = (list(validation_batches(validation_windows(corpus, data, S), 2, 8)) for _ in range(2))
    assert all(torch.equal(a.media.items_BK, b.media.items_BK) for a, b in zip(first, again, strict=True))


def test_lines_with_paths(tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.png").write_bytes(picture(number, "PNG"))
    lines = [{"image": f"{n}.png", "text": f"this is the picture {n}"} for n in range(12)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert near(all_pairs(data_of(tmp_path, str(tmp_path / "a.jsonl"))), range(12))


def test_paths_do_not_lead_out_of_their_folder(tmp_path):
    (tmp_path / "secret.png").write_bytes(picture(1, "PNG"))
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "0.png").write_bytes(picture(0, "PNG"))
    lines = [{"image": "0.png", "text": "good"}, {"image": "../secret.png", "text": "bad"}]
    (inner / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="leads out of"):
        prepare(data_of(tmp_path, str(inner / "a.jsonl")), 300)
    allowed = {"image": {**IMAGE, "folder": str(tmp_path)}}
    lines = [{"image": "inner/0.png", "text": "good"}, {"image": "secret.png", "text": "good"}]
    (inner / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = prepare(data_of(tmp_path, str(inner / "b.jsonl"), fields=allowed), 300)
    assert len(corpus.train_items.places_and_counts()[0]) == 2


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("a\0.png", r"1 wrong field, first at .*a.jsonl:1 \('a\\x00.png' in \"image\" cannot be the name of a file"),
        ("\ud800.png", r"1 wrong field, .*'\\ud800.png' in \"image\" cannot be the name"),
        ("\udcff.png", r"1 wrong field, .*'\\udcff.png' in \"image\" cannot be the name"),
        ("loop.png", r"1 wrong field, .*'loop.png' in \"image\" is a loop of links|1 image without its file"),
        (
            "loop.png/x.png",
            r"1 wrong field, .*'loop.png/x.png' in \"image\" is a loop of links|1 image without its file",
        ),
    ],
)
def test_names_that_no_file_can_have_are_refused(tmp_path, name, match):
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "a.jsonl").write_text(json.dumps({"image": name, "text": "a picture"}))
    with pytest.raises(UserError, match=match):
        prepare(data_of(tmp_path, str(tmp_path / "a.jsonl")), 300)
    with pytest.raises(UserError, match=r"loop.png does not exist"):
        prepare(data_of(tmp_path, str(tmp_path / "loop.png")), 300)


def test_fields_with_half_a_surrogate_in_their_names_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"\ud800": "a picture"}))
    with pytest.raises(UserError, match=r"1 no conversation, .*only \\ud800"):
        prepare(data_of(tmp_path, str(tmp_path / "a.jsonl"), format="conversations"), 300)


def test_a_folder_with_a_colon_in_its_name_is_the_folder_of_its_records(tmp_path):
    inner = tmp_path / "in:ner"
    inner.mkdir()
    (tmp_path / "secret.png").write_bytes(picture(1, "PNG"))
    (inner / "0.png").write_bytes(picture(0, "PNG"))
    lines = [{"image": "0.png", "text": "good"}, {"image": "secret.png", "text": "bad"}]
    (inner / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=r"1 of 2 documents .*1 image without its file, first at .*in:ner/secret\.png"):
        prepare(data_of(tmp_path, str(inner / "a.jsonl")), 300)


def test_a_link_beside_a_text_does_not_lead_out_of_its_folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(picture(1, "PNG"))
    (folder / "0.txt").write_text("this is the picture 0")
    (folder / "0.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(UserError, match=r"0\.png leads out of .*folder, to .*secret\.png"):
        prepare(data_of(tmp_path, str(folder)), 300)


def test_a_folder_of_texts_and_pictures(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.png").write_bytes(picture(number, "PNG"))
        (folder / f"{number}.txt").write_text(f"this is the picture {number}")
    data = data_of(tmp_path, str(folder))
    assert near(all_pairs(data), range(8))
    assert prepare(data, 300).notes == ()


def test_a_table_with_bytes(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"image": {"bytes": picture(n, "PNG"), "path": None}, "text": f"this is the picture {n}"} for n in range(9)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=4)
    assert near(all_pairs(data_of(tmp_path, str(tmp_path / "a.parquet"))), range(9))


def test_several_pictures_where_the_text_names_them(tmp_path):
    samples = []
    for n in range(6):
        text = f"left <image> and right <image> of {n}"
        samples.append(
            (f"{n}", {"0.jpg": picture(n), "1.jpg": picture(n + 100), "json": json.dumps({"text": text}).encode()})
        )
    data = data_of(tmp_path, write_tar(tmp_path / "a.tar", samples), packing="none")
    corpus = prepare(data, 300)
    batch = batches(training_stream(corpus, data, S, 0), 2)
    seen = set()
    for one in batch:
        for row in range(4):
            tokens, places = one.tokens_BS[row].tolist(), one.media.places_BKT[row].tolist()
            between = corpus.tokenizer.decode(tokens[places[0][-1] + 1 : places[1][0]])
            assert between == " and right " and corpus.tokenizer.decode(tokens[: places[0][0]]) == "left "
            seen.add(
                tuple(((one.media.items_BK[row, slot] * 0.5 + 0.5) * 255).mean().round().item() for slot in (0, 1))
            )
    assert len(seen) >= 4
    assert batches(training_stream(corpus, data, S, 0), 1)[0].media.items_BK.shape[1] == S // T


def test_conversations_about_pictures(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    lines = [
        {
            "image": f"{n}.png",
            "conversations": [{"from": "human", "value": "<image>\nwhich?"}, {"from": "gpt", "value": f"number {n}"}],
        }
        for n in range(6)
    ]
    lines += [
        {
            "images": [f"{n}.png"],
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nwhich?"}]},
                {"role": "assistant", "content": f"number {n}"},
            ],
        }
        for n in range(6, 12)
    ]
    for n in range(12):
        (tmp_path / f"{n}.png").write_bytes(picture(n, "PNG"))
    for name, some in (("a", lines[:6]), ("b", lines[6:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in some))
    data = data_of(
        tmp_path,
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "b.jsonl"),
        format="conversations",
        chat_template=str(template),
        packing="none",
    )
    corpus = prepare(data, 300)
    told = set()
    for batch in batches(training_stream(corpus, data, S, 0), 3):
        for tokens, labels, places in zip(batch.tokens_BS, batch.labels_BS, batch.media.places_BKT, strict=True):
            assert corpus.tokenizer.decode(tokens[: places[0, 0]].tolist()) == "[user]"
            told.add(corpus.tokenizer.decode(labels[labels != IGNORE].tolist()).split("<|")[0])
    assert told == {f"number {n}" for n in range(12)}


def test_placeholders_and_items_must_match(tmp_path):
    samples = captioned(range(40))
    samples[3] = ("3", {"jpg": picture(3), "txt": b"<image> and <image>"})
    samples[5] = ("5", {"0.jpg": picture(5), "1.jpg": picture(6), "txt": b"one <image>"})
    data = data_of(tmp_path, write_tar(tmp_path / "a.tar", samples))
    corpus = prepare(data, 300)
    assert len(corpus.notes) == 1 and "2 placeholders without items, first at" in corpus.notes[0]


@pytest.mark.parametrize("slots", [1, 3, 5, 16])
def test_no_sequence_has_more_items_than_slots(tmp_path, slots):
    data = data_of(tmp_path, write_tar(tmp_path / "a.tar", captioned(range(50))), items_per_sequence=slots)
    stream = stream_of(data)
    windows = stream.parts[0]
    counts = [(windows.read(window).media.places_KT()[:, 0] >= 0).sum() for window in range(len(windows))]
    # Without slots to respect, six of these samples fill a sequence.
    assert sum(counts) == 50 and max(counts) == min(slots, 6)


def many(tmp_path, items=6):
    """Samples, one of which has many pictures."""
    samples = captioned(range(20))
    text = " ".join(f"<image> word{n}" for n in range(items))
    samples.insert(7, ("many", {**{f"{n}.jpg": picture(n) for n in range(items)}, "txt": text.encode()}))
    return write_tar(tmp_path / "a.tar", samples)


@pytest.mark.parametrize("oversize", ["leave-out", "split", "refuse"])
def test_samples_with_too_many_items(tmp_path, oversize):
    from meshwright.data import training_index

    data = data_of(tmp_path, many(tmp_path), items_per_sequence=4, oversize=oversize)
    corpus = prepare(data, 300)
    if oversize == "refuse":
        with pytest.raises(UserError, match=r'1 of 21 samples do not fit .* 6 items.*data\.oversize = "leave-out"'):
            training_index(corpus, data, S)
        return
    index = training_index(corpus, data, S)
    assert (index.left_out, index.split) == ((1, 0) if oversize == "leave-out" else (0, 1))
    windows = training_stream(corpus, data, S, 0).parts[0]
    places = [windows.read(window).media.places_KT() for window in range(len(windows))]
    assert sum((place[:, 0] >= 0).sum() for place in places) == (20 if oversize == "leave-out" else 26)


def test_prepared_folders_keep_their_items(tmp_path):
    sources = [write_tar(tmp_path / f"{part}.tar", captioned(range(20 * part, 20 * part + 20))) for part in (0, 1)]
    data = data_of(tmp_path, *sources)
    tokenizer = prepare(data, 300).folder / "tokenizer.json"
    for part, source in enumerate(sources):
        wishes = Wishes((source,), tokenizer, fields=data.fields, validation_fraction=0.0)
        build(wishes, tmp_path / f"prepared-{part}", 1)
    folders = [str(tmp_path / f"prepared-{part}") for part in (0, 1)]
    assert near(all_pairs(data_of(tmp_path, *folders)), range(40))
    with pytest.raises(UserError, match=r"data\.fields do not fit"):
        prepare(data_of(tmp_path, *folders, fields={"image": {**IMAGE, "tokens": 9}}), 300)
    with pytest.raises(UserError, match=r"data\.fields do not fit"):
        prepare(Data(sources=(folders[0],)), 300)
    # A tar that changed since is not read as if it had not.
    write_tar(tmp_path / "0.tar", captioned(range(21)))
    with pytest.raises(UserError, match=r"0\.tar changed since its samples were prepared"):
        all_pairs(data_of(tmp_path, *folders))


def test_compressed_tars_are_copied(tmp_path):
    import gzip

    write_tar(tmp_path / "a.tar", captioned(range(10)))
    packed = tmp_path / "b.tar.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    assert near(all_pairs(data_of(tmp_path, str(packed))), range(10))


def test_pictures_and_texts_of_two_sources_are_joined_by_key(tmp_path):
    pictures = write_tar(tmp_path / "a.tar", [(f"k{n}", {"jpg": picture(n)}) for n in range(12)])
    lines = [{"id": f"k{n}", "text": f"this is the picture {n}"} for n in reversed(range(11))]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = data_of(tmp_path, pictures, str(tmp_path / "b.jsonl"), join="id")
    # The last picture has no text, so there is nothing to learn from it.
    assert near(all_pairs(data), range(11), text="\n\nthis is the picture {}")
    # The other way round the text comes first.
    turned = data_of(tmp_path, str(tmp_path / "b.jsonl"), pictures, join="id")
    corpus = prepare(turned, 300)
    batch = batches(training_stream(corpus, turned, S, 1), 1)[0]
    first = batch.media.places_BKT[0, 0, 0]
    assert corpus.tokenizer.decode(batch.tokens_BS[0, :first].tolist()).startswith("this is the picture")
    assert len(corpus.train_items.places_and_counts()[0]) == 11
