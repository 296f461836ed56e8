"""Ctrl-C while a library works that does not listen to it."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import wait_for_file

from meshwright.data.prepared import workers
from meshwright.data.raw import Taking, list_inputs, plan_units


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are not forked from this one")
def test_ctrl_c_ends_the_training_of_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = tmp_path / "began"

    def endless(*_: object) -> str:
        began.write_text(str(os.getpid()))
        time.sleep(600)  # as deaf to Ctrl-C as the library
        return ""

    def interrupt() -> None:
        wait_for_file(began)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # who is started in the background is deaf to it
    monkeypatch.setattr(workers, "_train", endless)
    (tmp_path / "text.txt").write_text("some words " * 50_000)
    units = plan_units(list_inputs([str(tmp_path / "text.txt")]).files)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        workers.train_on(units, Taking(), 300)
    with pytest.raises(ProcessLookupError):
        os.kill(int(began.read_text()), 0)
