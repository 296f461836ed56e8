"""The folder that `meshwright data prepare` fills: one call's alone, finished shards kept over any interruption."""

import errno
import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from meshwright.atomic import write_atomic
from meshwright.data.chat import CONFIG, TEMPLATE, load_chat_template
from meshwright.data.files import read_text
from meshwright.data.media.take import media_taking
from meshwright.data.own_sources import read_into_files
from meshwright.data.prepared.fill import Report, Wishes, fill, order_for
from meshwright.data.prepared.folder import MANIFEST, PARTIAL, TOKENIZER, Manifest, read_manifest
from meshwright.data.raw import Taking
from meshwright.data.tokenizer import Tokenizer, load_tokenizer, require_trainable
from meshwright.errors import UserError

_PLAN = "plan.json"
_RULES = 2
"""Written down with an unfinished preparation: one that a version with other rules began is not gone on with."""
_DYING_S = 3.0
"""Workers of a killed call hold its lock until they are gone too."""


def build(
    wishes: Wishes,
    out: Path,
    workers: int | None = None,
    report: Report = lambda progress: None,
    *,
    unit_bytes: int | None = None,
) -> Manifest:
    """Prepare the sources into a folder, or finish what an interrupted call began there.

    The same wishes over the same input give the same bytes, whatever the number of workers and the interruptions.
    """
    taking = _taking(wishes)
    wishes = replace(wishes, sources=read_into_files(wishes.sources, wishes.text_field, None))
    order = order_for(wishes, _given_tokenizer(wishes), taking, unit_bytes)
    if (out / MANIFEST).is_file():
        return _already_there(out, order.identity)
    with _claimed(out, order.identity):
        manifest = fill(out, order, workers, report)
    shutil.rmtree(out / PARTIAL)
    return manifest


def _given_tokenizer(wishes: Wishes) -> Tokenizer | None:
    if wishes.tokenizer is not None:
        return load_tokenizer(wishes.tokenizer.expanduser(), f"--tokenizer {wishes.tokenizer}")
    require_trainable(wishes.vocab_size, "--vocab-size")
    return None


def _taking(wishes: Wishes) -> Taking:
    return media_taking(_texts(wishes), wishes.fields, wishes.encoder, wishes.check, wishes.sources)


def _texts(wishes: Wishes) -> Taking:
    if wishes.content == "text":
        if wishes.chat_template is not None:
            raise UserError(
                f"--chat-template {wishes.chat_template} writes conversations, not text; give --format conversations "
                "or preferences, or leave it out"
            )
        if wishes.join is not None and len(wishes.sources) < 2:
            raise UserError(f"--join {wishes.join} needs two sources or more; name them or leave it out")
        return Taking(wishes.text_field, wishes.join)
    if wishes.join is not None:
        raise UserError(
            f"--join {wishes.join} joins several texts into one and does not support {wishes.content}; leave one out"
        )
    template = None if wishes.chat_template is None else str(wishes.chat_template)
    tokenizer = None if wishes.tokenizer is None else wishes.tokenizer.expanduser()
    chat = load_chat_template(tokenizer, template, "--chat-template")
    return Taking(chat=chat, pairs=wishes.content == "preferences")


def _already_there(out: Path, identity: str) -> Manifest:
    manifest = read_manifest(out)
    if manifest.identity != identity:
        raise UserError(
            f"--out {out} holds tokens of other sources, another tokenizer or other settings; choose another folder "
            "or delete this one"
        )
    shutil.rmtree(out / PARTIAL, ignore_errors=True)  # of a call that was killed at its very end
    return manifest


@contextmanager
def _claimed(out: Path, identity: str) -> Iterator[None]:
    """The folder for this call alone; one in which nothing was finished is not left behind."""
    partial, plan = out / PARTIAL, out / PARTIAL / _PLAN
    identity = f"{identity} {_RULES}"
    made = not out.exists()
    if not made and (not out.is_dir() or (any(out.iterdir()) and not partial.is_dir())):
        raise UserError(f"--out {out} exists and is not a prepared folder; choose another")
    if plan.is_file() and read_text(plan) != identity:
        raise UserError(
            f"--out {out} holds an unfinished preparation of other sources, another tokenizer, other settings or "
            "another version; choose another folder or delete this one"
        )
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with (partial / "lock").open("ab") as lock:
            _lock(lock.fileno(), out)
            for left in partial.glob("unit-*"):
                shutil.rmtree(left)
            write_atomic(plan, identity, durable=True)
            yield
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        if not (out / MANIFEST).is_file() and not any(partial.glob("[0-9]*.json")):
            shutil.rmtree(partial, ignore_errors=True)
            for name in (TOKENIZER, TEMPLATE, CONFIG):
                (out / name).unlink(missing_ok=True)
            with suppress(OSError):
                if made:
                    out.rmdir()


def _lock(descriptor: int, out: Path) -> None:
    deadline = time.monotonic() + _DYING_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--out {out} is being prepared by another process; wait for it or choose another"
                ) from error
            time.sleep(0.05)
        except OSError:
            return  # some file systems have no locks


def _unwritable(out: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"--out {out}: the disk or quota is full; free some and run the same command again: finished shards are "
            "kept"
        )
    return UserError(f"--out {out} cannot be written ({error.strerror}); choose a folder you may write to")
