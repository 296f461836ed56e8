"""`meshwright chat`: a model that learned conversations here, asked once, by a file, and by a person at a terminal."""

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import LIMIT_S, wait_for_file

import meshwright
from meshwright.cli import main

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ("apple", "bread", "cloud", "drum")
JOB = """
[model]
preset = "tiny-llama"
vocab_size = 300
[data]
sources = [SOURCES]
format = "conversations"
packing = "best-fit"
mask_documents = true
workers = 0
validation_fraction = 0
[batch]
sequence_length = 64
global_batch = 8
micro_batch = 8
[optimizer]
lr = 1e-2
[run]
steps = 40
device = "cpu"
folder = "run"
"""
GREEDY = ("--temperature", "0", "--tokens", "12", "--device", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was trained on a prepared folder, from scratch."""
    path = tmp_path_factory.mktemp("talk")
    lines = []
    for number, word in enumerate(WORDS * 20):
        asked, answer = f"after {word}?", WORDS[(number + 1) % len(WORDS)]
        lines.append(json.dumps({"messages": [turn("user", asked), turn("assistant", answer)]}))
    (path / "talk.jsonl").write_text("\n".join(lines))
    (path / "template.jinja").write_text(TEMPLATE)
    (path / "job.toml").write_text(JOB.replace("SOURCES", '"talk"'))
    words = ["data", "prepare", "talk.jsonl", "--format", "conversations", "--chat-template", "template.jinja"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("XDG_CACHE_HOME", str(path / "cache"))
        for arguments in ([*words, "--vocab-size", "300", "--out", "talk"], ["train", "job.toml", "--json"]):
            patch.setattr(sys, "argv", ["meshwright", *arguments])
            with pytest.raises(SystemExit, match="0"):
                main()
    return path


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture
def run(trained: Path, cli: Any, tmp_path: Path) -> Path:
    """The same, where the command line runs."""
    (tmp_path / "run").symlink_to(trained / "run")
    return tmp_path / "run"


@pytest.mark.thorough
def test_the_report_marks_what_was_learned(run: Path) -> None:
    from meshwright.studio import write_report

    page = write_report(run, run.parent / "page.html").read_text()
    assert "What counts in the loss" in page
    word = re.search(r'&lt;user&gt;after (\w+)\?&lt;assistant&gt;<mark class="counts">(\w+)</mark>', page)
    assert word is not None and word[2] in WORDS


def test_one_question_is_answered(cli: Any, run: Path) -> None:
    assert cli("chat", "run", "--once", "after bread?", *GREEDY).out == "cloud\n"
    told = json.loads(cli("chat", "run", "--once", "after cloud?", *GREEDY, "--json").out)
    messages = [turn("user", "after cloud?"), turn("assistant", "drum")]
    expected = {"source": "run", "step": 40, "messages": messages, "answer": "drum", "stopped": "<|endoftext|>"}
    assert told == expected | {"tokens": told["tokens"]} and 0 < told["tokens"] < 12
    cut = json.loads(cli("chat", "run", "--once", "after cloud?", "--temperature", "0", "--tokens", "1", "--json").out)
    assert (cut["tokens"], cut["stopped"]) == (1, None) and "drum".startswith(cut["answer"])


def test_generate_reads_the_template_s_tokens_as_text_that_is_typed_out(cli: Any, run: Path) -> None:
    prompt = "<user>after apple?<assistant>"
    assert cli("generate", "run", "--prompt", prompt, *GREEDY).out == f"{prompt}bread\n"


def test_the_exported_folder_says_the_same_in_transformers(cli: Any, run: Path, tmp_path: Path) -> None:
    import transformers

    assert cli("checkpoint", "export", "run", "out").code == 0
    assert cli("chat", "out", "--once", "after apple?", *GREEDY).out == "bread\n"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt: Any = tokenizer.apply_chat_template(
        [turn("user", "after apple?")], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(written) == "bread<|endoftext|>"


def test_a_python_program_talks_to_it_too(run: Path) -> None:
    chat = meshwright.open_run(run).chat(temperature=0, tokens=12, device="cpu")
    assert chat.ask("after drum?") == "apple" and "".join(chat.stream("after apple?"))
    assert [message.role for message in chat.messages] == ["user", "assistant"] * 2


def test_questions_from_a_file_are_one_conversation(cli: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("after apple?\n\nafter drum?\n"))
    done = cli("chat", "run", *GREEDY)
    assert done.code == 0 and done.err == "" and done.out.splitlines()[0] == "bread" and len(done.out.splitlines()) == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO("an <|endoftext|> in it\nafter apple?\n"))
    refused = cli("chat", "run", *GREEDY)
    assert refused.code == 2 and refused.out == "" and "holds the special token <|endoftext|>" in refused.err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"after \xff?\n"), encoding="utf-8"))
    assert cli("chat", "run", *GREEDY).err == "meshwright: a question is not UTF-8 text; save it as UTF-8\n"


def test_what_has_no_chat_template_is_refused(cli: Any, run: Path, tiny_job: Path, tmp_path: Path) -> None:
    assert cli("train", "job.toml", "--set", "run.steps=1", "--set", 'run.folder="plain"').code == 0
    assert cli("checkpoint", "export", "plain", "out").code == 0
    for folder in ("plain", "out"):
        refused = cli("chat", folder)
        assert refused.code == 2 and len(refused.err.splitlines()) == 1
        assert f"{folder} has no chat template" in refused.err
        assert f"meshwright generate {folder} --prompt TEXT" in refused.err
    assert "neither a run folder nor a Hugging Face folder" in cli("chat", str(tmp_path)).err
    assert "--once" in cli("chat", "run", "--json").err
    assert '--once = " " holds no question' in cli("chat", "run", "--once", " ").err
    own = tmp_path / "own"
    shutil.copytree(run, own)
    job = json.loads((own / "job.resolved.json").read_text())
    job["model"]["file"] = "own.py"
    (own / "job.resolved.json").write_text(json.dumps(job))
    assert "own trained model.file = own.py, which cannot generate text" in cli("chat", "own").err


class Terminal:
    """The command line in a fork of this process, at a terminal of its own."""

    def __init__(self, *arguments: str, prepare: Callable[[], None] = lambda: None) -> None:
        self._pid, self._file = pty.fork()
        self.shown, self._seen = "", 0
        if self._pid == 0:
            sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
            sys.argv = ["meshwright", *arguments]
            code: int | str | None = 1
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                prepare()
                main()
                code = 0
            except SystemExit as stop:
                code = stop.code
            finally:
                sys.stdout.flush()
                os._exit(int(code or 0))

    def wait_for(self, text: str) -> None:
        """Read until a text is shown after what was waited for before."""
        until = time.monotonic() + LIMIT_S
        while (found := self.shown.find(text, self._seen)) < 0:
            ready, _, _ = select.select([self._file], [], [], max(0.0, until - time.monotonic()))
            assert ready, self.shown
            self.shown += os.read(self._file, 4096).decode(errors="replace")
        self._seen = found + len(text)

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def end_with(self, key: str) -> int:
        """Press a key until it ends, and return its exit code.

        A terminal that is not at the prompt yet takes Ctrl-D for something else, and Python misses a Ctrl-C between the
        prompt and its wait for input.
        """
        until = time.monotonic() + LIMIT_S
        self.type(key)
        try:
            while True:
                if not select.select([self._file], [], [], 1.0)[0]:
                    assert time.monotonic() < until, self.shown
                    self.type(key)
                elif read := os.read(self._file, 4096):
                    self.shown += read.decode(errors="replace")
                else:
                    break
        except OSError:  # it is closed
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def test_ctrl_d_ends_a_conversation_at_a_terminal(run: Path) -> None:
    terminal = Terminal("chat", "run", *GREEDY)
    terminal.wait_for("> ")
    terminal.type("after apple?\n")
    terminal.wait_for("bread\r\n> ")
    terminal.type("an <|endoftext|> in it\n")
    terminal.wait_for("meshwright: the conversation holds the special token")
    terminal.wait_for("\r\n> ")
    assert terminal.end_with("\x04") == 0 and "Traceback" not in terminal.shown


def test_ctrl_c_stops_an_answer_and_then_the_conversation(run: Path, tmp_path: Path) -> None:
    answering = tmp_path / "answering"

    def answer_without_end() -> None:
        import meshwright.runs.chat as chat
        from meshwright.train import stream

        def endless(*arguments: Any, **options: Any) -> Iterator[int]:
            yield next(iter(stream(*arguments, **options)))
            answering.touch()
            time.sleep(3600)  # the second token never comes

        chat.stream = endless

    words = ("--temperature", "5", "--tokens", "120", "--device", "cpu")
    terminal = Terminal("chat", "run", *words, prepare=answer_without_end)
    terminal.wait_for("> ")
    terminal.type("after apple?\n")
    terminal.wait_for("\n")
    wait_for_file(answering)
    terminal.type("\x03")
    terminal.wait_for("> ")
    assert terminal.end_with("\x03") == 0
    assert "Traceback" not in terminal.shown and "interrupted" not in terminal.shown
