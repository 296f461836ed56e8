"""A model that reads pictures, asked: pictures in prompts and chats, held-out samples, and what is refused."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console

import meshwright
from meshwright.data import IGNORE, Shown, shapes_corpus
from meshwright.data.batch import stack_samples
from meshwright.data.shapes import WORDS, ShapeWindows
from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.runs.chat import open_chat
from meshwright.runs.evaluate import evaluate_run
from meshwright.runs.generate import generate_from_run
from meshwright.runs.writer import open_writer

COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220)}
SMALL = [
    *("model.width=32", "model.layers=1", "model.heads=2", "model.ffn_width=48", "data.workers=0"),
    *("model.vision.width=16", "model.vision.layers=1", "model.vision.heads=2", "model.vision.ffn_width=32"),
    *("batch.global_batch=16", "batch.micro_batch=16", "run.device=cpu", "run.steps=2", "schedule.warmup_steps=1"),
    *("evaluation.every_steps=0",),
]
CHAT_JOB = """
[model]
vocab_size = 300
width = 32
layers = 1
heads = 2
ffn_width = 64
max_sequence_length = 128

[model.vision]
image_size = 16
patch = 8
width = 16
layers = 1
heads = 2
ffn_width = 32
images = 2

[data]
sources = ["pictures.tar"]
format = "conversations"
chat_template = "chat.jinja"
validation_fraction = 0.2
workers = 0
cache = "cache"

[data.fields.image]
kind = "image"

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


def png(colour: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (24, 20), colour).save(stream, "PNG")
    return stream.getvalue()


def write_tar(path: Path, count: int, first: int = 0) -> None:
    """Conversations about pictures of one colour."""
    with tarfile.open(path, "w") as archive:
        for number in range(first, first + count):
            name = list(COLOURS)[number % 2]
            shade = tuple(min(255, part + number % 20) for part in COLOURS[name])
            talk = [{"role": "user", "content": "<image>colour?"}, {"role": "assistant", "content": name}]
            members = {"png": png(shade), "json": json.dumps({"messages": talk}).encode()}
            for ending, raw in members.items():
                info = tarfile.TarInfo(f"{number:04}.{ending}")
                info.size = len(raw)
                archive.addfile(info, io.BytesIO(raw))


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that learned to tell two colours apart, in conversations."""
    folder = tmp_path_factory.mktemp("talker")
    write_tar(folder / "pictures.tar", 80)
    (folder / "chat.jinja").write_text(TEMPLATE)
    for name, colour in COLOURS.items():
        (folder / f"{name}.png").write_bytes(png(colour))
    (folder / "job.toml").write_text(CHAT_JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_job(load_job("job.toml", []), Console(quiet=True))
    return folder


@pytest.fixture(scope="module")
def drawer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of drawings that has learned next to nothing."""
    run = tmp_path_factory.mktemp("drawer") / "run"
    run_job(load_job("vlm-tiny", [*SMALL, f"run.folder={run}"]), Console(quiet=True))
    return run


@pytest.mark.thorough
def test_answers_depend_on_the_picture(talker: Path) -> None:
    for name in COLOURS:
        chat = open_chat(talker / "run", "cpu", None, Shown([talker / f"{name}.png"]), temperature=0, tokens=8)
        assert chat.ask("colour?").startswith(name)
        assert chat.messages[0].content == "<image>colour?"
        # The picture stays where it was when the conversation goes on, and is not computed again.
        assert chat.ask("colour?") is not None and chat.messages[2].content == "colour?"
        prompt = "user:\n<image>colour?\nassistant:\n"
        text, step = generate_from_run(talker / "run", prompt, 4, 0.0, 1.0, 0, "cpu", Shown([talker / f"{name}.png"]))
        assert text.removeprefix(prompt).strip().startswith(name) and step == 60
        run = meshwright.open_run(talker / "run")
        assert run.generate(prompt, 4, images=[str(talker / f"{name}.png")], temperature=0, device="cpu") == text


def test_a_cache_changes_no_answer(talker: Path) -> None:
    """The second turn of a chat, computed on top of the first, equals one that is computed whole."""
    picture = Shown([talker / "red.png"])
    chat = open_chat(talker / "run", "cpu", None, picture, temperature=0, tokens=4)
    first = chat.ask("colour?")
    second = chat.ask("colour?")
    prompt = f"user:\n<image>colour?\nassistant:\n{first}\nuser:\ncolour?\nassistant:\n"
    whole, _ = generate_from_run(talker / "run", prompt, 4, 0.0, 1.0, 0, "cpu", picture)
    assert whole.removeprefix(prompt) == second


def test_held_out_samples_and_others_are_evaluated_with_their_pictures(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(talker)
    write_tar(tmp_path / "others.tar", 12, first=500)
    (own,) = evaluate_run(talker / "run", {}, "cpu", None)[0].values()
    (other,) = evaluate_run(talker / "run", {"others": str(tmp_path / "others.tar")}, "cpu", None)[0].values()
    assert own.loss < 0.1 and other.loss < 0.1 and other.tokens > 12
    # With the pictures exchanged the same answers are wrong.
    monkeypatch.setattr("test_runs_pictures.COLOURS", {"red": COLOURS["blue"], "blue": COLOURS["red"]})
    write_tar(tmp_path / "swapped.tar", 12, first=500)
    (swapped,) = evaluate_run(talker / "run", {"swapped": str(tmp_path / "swapped.tar")}, "cpu", None)[0].values()
    assert swapped.loss > other.loss + 1


def test_drawings_are_asked_by_words_and_answered_as_the_loss_counts_them(drawer: Path, tmp_path: Path) -> None:
    job = load_job(str(drawer)).job
    windows = shapes_corpus(job.model.vision, job.model.vocab_size, job.batch.sequence_length, 0).windows[1]
    assert isinstance(windows, ShapeWindows)
    writer = open_writer(drawer, "cpu")
    for number in range(3):
        drawing = windows.drawing(number)
        pixels = drawing.picture(32).transpose(1, 2, 0)
        Image.fromarray(pixels).save(tmp_path / "drawing.png")
        prompt = f"{drawing.question}?"
        text, _ = generate_from_run(drawer, prompt, 1, 0.0, 1.0, 0, "cpu", Shown([tmp_path / "drawing.png"]))
        batch = stack_samples([windows.read(number)], [number])
        with torch.no_grad():
            likeliest_S = writer.model(batch.tokens_BS, media=batch.media)[0].argmax(-1)
        first = int(likeliest_S[batch.labels_BS[0] != IGNORE][0])
        wanted = "" if first == writer.tokenizer.end_of_text else WORDS[first]
        assert text.removeprefix(prompt).strip() == wanted
    assert evaluate_run(drawer, {}, "cpu", 1)[0]["held-out"].tokens > 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--prompt", "<image> and <image>", "--image", "red.png"], "has 2 <image> and --image names 1 pictures"),
        (["--prompt", "<image>"], "has 1 <image> and --image names 0 pictures"),
        (["--image", "none.png"], "--image none.png cannot be read"),
        (["--image", "chat.jinja"], "--image chat.jinja is none of JPEG"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    talker: Path, cli: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(talker)
    done = cli("generate", "run", *words)
    assert done.code == 2 and sentence in " ".join(done.err.split()) and "Traceback" not in done.err


def test_a_model_without_an_encoder_refuses_pictures(cli: Any, tiny_job: Path, tmp_path: Path) -> None:
    assert cli("train", "job.toml", "--set", "run.steps=1", "--set", "evaluation.every_steps=0").code == 0
    (tmp_path / "a.png").write_bytes(png((1, 2, 3)))
    done = cli("generate", "run", "--image", "a.png")
    assert done.code == 2 and "run reads no pictures, since it has no model.vision; leave out --image" in done.err


def test_an_own_encoder_is_not_run(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(talker)
    resolved = json.loads((talker / "run" / "job.resolved.json").read_text())
    resolved["data"]["encoder"] = "own.py:Encoder"
    monkeypatch.setattr("meshwright.runs.writer.RunFolder.resolved_job", lambda self, trust: load_job_of(resolved))
    with pytest.raises(UserError, match=r"data.encoder = own.py:Encoder, code that is not run here"):
        generate_from_run(talker / "run", "", 1, 0.0, 1.0, 0, "cpu", Shown([talker / "red.png"]))


def load_job_of(resolved: dict[str, Any]) -> Any:
    from meshwright.job import Job

    return Job.model_validate(resolved)
