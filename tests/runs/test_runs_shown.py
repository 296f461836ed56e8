"""Sound and film in prompts and chats: answers depend on them, they are read as in training, and what is refused."""

import io
import json
import tarfile
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import meshwright
from meshwright.data import IGNORE, Shown, tones_corpus
from meshwright.data.batch import stack_samples
from meshwright.data.media.container import FORMATS
from meshwright.data.tones import RATE, WORDS, ToneWindows, tones_tokenizer
from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.runs.chat import open_chat
from meshwright.runs.generate import generate_from_run
from meshwright.runs.writer import open_writer

pytest.importorskip("av")
SMALL = [
    *("model.width=16", "model.layers=2", "model.heads=2", "model.ffn_width=32", "data.workers=0"),
    *("model.audio.width=16", "model.audio.layers=1", "model.audio.heads=2", "model.audio.ffn_width=32"),
    *("batch.global_batch=8", "batch.micro_batch=4", "evaluation.every_steps=0", "run.device=cpu"),
    *("run.steps=2", "schedule.warmup_steps=1"),
]
JOB = """
[model]
vocab_size = 300
width = 32
layers = 1
heads = 2
ffn_width = 64
max_sequence_length = 128

{model}

[data]
sources = ["samples.tar"]
format = "conversations"
chat_template = "chat.jinja"
validation_fraction = 0.0
workers = 0
cache = "cache"

{fields}

[batch]
sequence_length = 64
global_batch = 16
micro_batch = 16

[optimizer]
lr = 1e-2

[evaluation]
every_steps = 0

[run]
steps = 60
device = "cpu"
folder = "run"
"""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
AUDIO = """
[model.audio]
mels = 16
seconds = 0.2
windows = 2
width = 16
layers = 1
heads = 2
ffn_width = 32
"""
VISION = """
[model.vision]
image_size = 16
patch = 8
width = 16
layers = 1
heads = 2
ffn_width = 32
images = 3
"""
SOUND_FIELD = "[data.fields.audio]\nkind = 'audio'\nrate = 8000"
FILM_FIELDS = "[data.fields.image]\nkind = 'image'\n[data.fields.video]\nkind = 'video'\nframes = 2"
HERTZ = {"low": 400.0, "high": 2500.0}
COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220)}


def wav(samples: Any, rate: int = RATE, channels: int = 1, width: int = 2) -> bytes:
    """A WAV file of samples between -1 and 1; of 8 bits they are written without a sign."""
    levels = np.round(np.asarray(samples) * (32767 if width == 2 else 127)) + (0 if width == 2 else 128)
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(levels.astype("<i2" if width == 2 else "u1").tobytes())
    return stream.getvalue()


def tone(hertz: float, seconds: float = 0.3) -> Any:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * RATE)) / RATE)


def film(colours: list[tuple[int, int, int]]) -> bytes:
    import av

    stream = io.BytesIO()
    with av.open(stream, "w", format="matroska") as container:
        video = container.add_stream("ffv1", rate=10)
        video.width = video.height = 24
        video.pix_fmt = "bgr0"
        for colour in colours:
            pixels = np.full((24, 24, 3), colour, np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode())
    return stream.getvalue()


def talker(folder: Path, model: str, fields: str, name: str, ending: str, samples: dict[str, Any]) -> Path:
    """The folder of a run that learned to tell two things apart, in conversations."""
    with tarfile.open(folder / "samples.tar", "w") as archive:
        for number in range(64):
            answer = list(samples)[number % 2]
            talk = [{"role": "user", "content": f"<{name}>which?"}, {"role": "assistant", "content": answer}]
            for kind, raw in ((ending, samples[answer](number)), ("json", json.dumps({"messages": talk}).encode())):
                info = tarfile.TarInfo(f"{number:04}.{kind}")
                info.size = len(raw)
                archive.addfile(info, io.BytesIO(raw))
    (folder / "chat.jinja").write_text(TEMPLATE)
    for answer, make in samples.items():
        (folder / f"{answer}.{ending}").write_bytes(make(0))
    (folder / "empty.wav").write_bytes(b"")
    (folder / "text.mkv").write_bytes(b"no film " * 8)
    (folder / "job.toml").write_text(JOB.format(model=model, fields=fields))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_job(load_job("job.toml", []), Console(quiet=True))
    return folder


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = {name: lambda n, hertz=hertz: wav(tone(hertz + n)) for name, hertz in HERTZ.items()}
    return talker(tmp_path_factory.mktemp("listener"), AUDIO, SOUND_FIELD, "audio", "wav", samples)


@pytest.fixture(scope="module")
def watcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = {name: lambda n, shade=shade: film([shade] * 4) for name, shade in COLOURS.items()}
    return talker(tmp_path_factory.mktemp("watcher"), VISION, FILM_FIELDS, "video", "mkv", samples)


@pytest.fixture(scope="module")
def dialler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the recipe of sounds that has learned next to nothing."""
    run = tmp_path_factory.mktemp("dialler") / "run"
    run_job(load_job("speech-tiny", [*SMALL, f"run.folder={run}"]), Console(quiet=True))
    return run


def test_answers_depend_on_the_sound(listener: Path) -> None:
    for name in HERTZ:
        file = listener / f"{name}.wav"
        chat = open_chat(listener / "run", "cpu", None, Shown(audio=[file]), temperature=0, tokens=8)
        assert chat.ask("which?").startswith(name) and chat.messages[0].content == "<audio>which?"
        prompt = "user:\n<audio>which?\nassistant:\n"
        text = meshwright.open_run(listener / "run").generate(prompt, 4, audio=[file], temperature=0, device="cpu")
        assert text.removeprefix(prompt).strip().startswith(name)
        talk = meshwright.open_run(listener / "run").chat(audio=[str(file)], temperature=0, device="cpu", tokens=4)
        assert talk.ask("which?").startswith(name)


@pytest.mark.parametrize(("rate", "channels", "width"), [(8000, 1, 1), (16000, 2, 1), (44100, 2, 2)])
def test_sounds_of_other_forms_are_heard_alike(
    listener: Path, tmp_path: Path, rate: int, channels: int, width: int
) -> None:
    for name, hertz in HERTZ.items():
        samples = 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(0.3 * rate)) / rate)
        (tmp_path / "a.wav").write_bytes(wav(np.repeat(samples, channels), rate, channels, width))
        chat = open_chat(listener / "run", "cpu", None, Shown(audio=[tmp_path / "a.wav"]), temperature=0, tokens=8)
        assert chat.ask("which?").startswith(name)


def test_answers_depend_on_the_film(watcher: Path) -> None:
    for name in COLOURS:
        shown = Shown(videos=[watcher / f"{name}.mkv"])
        chat = open_chat(watcher / "run", "cpu", None, shown, temperature=0, tokens=8)
        assert chat.ask("which?").startswith(name) and chat.messages[0].content == "<video>which?"
    run = meshwright.open_run(watcher / "run")
    prompt = "user:\n<video>which?\nassistant:\n"
    text = run.generate(prompt, 4, videos=[watcher / "blue.mkv"], temperature=0, device="cpu")
    assert text.removeprefix(prompt).strip().startswith("blue")


def test_a_sound_is_written_down_as_the_loss_counts_it(dialler: Path, tmp_path: Path, cli: Any) -> None:
    """The recipe's own sounds, as files: the model hears them as in training, and its keys are printed as one word."""
    job = load_job(str(dialler)).job
    windows = tones_corpus(job.model.audio, job.model.vocab_size, job.batch.sequence_length, 0).windows[1]
    assert isinstance(windows, ToneWindows)
    writer = open_writer(dialler, "cpu")
    for number in range(4):
        file = tmp_path / "dialled.wav"
        file.write_bytes(wav(windows.dialled(number).wave()))
        shown, batch = Shown(audio=[file]), stack_samples([windows.read(number)], [number])
        (items,) = writer.viewer(shown).look(shown)["audio"]
        own = batch.media.items_BK[0, : windows.filled(number)]
        assert items.shape == own.shape and float((items - own).abs().mean()) < 0.01
        with torch.no_grad():
            likeliest_S = writer.model(batch.tokens_BS, media=batch.media)[0].argmax(-1)
        first = int(likeliest_S[batch.labels_BS[0] != IGNORE][0])
        text, _ = generate_from_run(dialler, "", 1, 0.0, 1.0, 0, "cpu", shown)
        assert text == ("" if first in (0, 1) else WORDS[first])
    done = cli("generate", str(dialler), "--audio", str(file), "--tokens", "3", "--json")
    assert done.code == 0 and json.loads(done.out)["step"] == 2


def test_keys_are_letters_of_a_tokenizer() -> None:
    tokenizer = tones_tokenizer()
    tokens = tokenizer.encode_prompt("<audio>12A#")
    assert [WORDS[token] for token in tokens] == ["<audio>", "1", "2", "A", "#"]
    assert tokenizer.decode(tokens[1:]) == "12A#" and WORDS[tokenizer.encode("x")[0]] == "<unk>"


def test_pictures_and_films_share_a_prompt(watcher: Path, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (20, 20), COLOURS["red"]).save(tmp_path / "red.png")
    (tmp_path / "changes.mkv").write_bytes(film([COLOURS["red"]] * 4 + [COLOURS["blue"]] * 4))
    writer, shown = open_writer(watcher / "run", "cpu"), Shown([tmp_path / "red.png"], [tmp_path / "changes.mkv"])
    viewer, encode = writer.viewer(shown), writer.tokenizer.encode_rendered
    text = viewer.named("a <video> b <image> c", shown)
    tokens, media = viewer.encode(writer.tokenizer, text, viewer.look(shown), encode, encode)
    before, between, after = (len(encode(part)) for part in ("a ", " b ", " c"))
    # A film of two frames of four tokens each, and then a picture of four.
    places = [*range(before, before + 8), *range(before + 8 + between, before + 12 + between)]
    assert media.places_BKT.flatten().tolist() == places and len(tokens) == places[-1] + 1 + after
    reds = media.items_BK[0, :, 0].mean((1, 2))
    assert reds[0] > 0.5 > reds[1] and reds[2] > 0.5, "red, then blue; and the picture"
    assert viewer.named("which?", shown).startswith("<video><image>")


@pytest.mark.parametrize(
    ("place", "words", "sentence"),
    [
        ("listener", ["--image", "low.wav"], "run reads no pictures, since it has no model.vision; leave out --image"),
        ("listener", ["--video", "low.wav"], "run reads no film, since it has no model.vision; leave out --video"),
        ("listener", ["--audio", "none.wav"], "--audio none.wav cannot be read (No such file or directory); correct"),
        ("listener", ["--audio", "empty.wav"], "--audio empty.wav has no bytes; give another sound"),
        (
            "listener",
            ["--audio", "chat.jinja"],
            f"chat.jinja is no sound in a known format; those are {FORMATS}",
        ),
        ("listener", ["--audio", "."], "--audio . cannot be read (Is a directory); correct the path"),
        ("listener", ["--prompt", "<audio>"], "the prompt has 1 <audio> and --audio names 0 sounds; give one for each"),
        ("watcher", ["--audio", "red.mkv"], "run reads no sound, since it has no model.audio; leave out --audio"),
        ("watcher", ["--video", "empty.wav"], "--video empty.wav has no bytes; give another film"),
        ("watcher", ["--video", "text.mkv"], f"text.mkv is no film in a known format; those are {FORMATS}"),
        (
            "watcher",
            ["--prompt", "<video> <video>", "--video", "red.mkv"],
            "the prompt has 2 <video> and --video names 1 films; give one for each, or leave <video> out",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(
    request: pytest.FixtureRequest,
    cli: Any,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(request.getfixturevalue(place))
    done = cli("generate", "run", *words)
    assert done.code == 2 and sentence in " ".join(done.err.split()) and "Traceback" not in done.err
    if "--prompt" not in words:
        done = cli("chat", "run", "--once", "which?", *words)
        assert done.code == 2 and sentence in " ".join(done.err.split()) and "Traceback" not in done.err


def test_a_run_without_films_refuses_them(cli: Any, tmp_path: Path) -> None:
    settings = ("data.workers=0", "run.steps=1", "schedule.warmup_steps=1", f"run.folder={tmp_path}/r")
    done = cli("train", "vlm-tiny", *(word for setting in settings for word in ("--set", setting)))
    assert done.code == 0 and done.out.endswith(f"continue meshwright generate {tmp_path}/r --image FILE\n")
    (tmp_path / "a.mkv").write_bytes(film([COLOURS["red"]]))
    done = cli("generate", str(tmp_path / "r"), "--video", str(tmp_path / "a.mkv"))
    told = " ".join(done.err.split())
    assert done.code == 2 and "has learned from no films, since none of its data.fields is of kind" in told
