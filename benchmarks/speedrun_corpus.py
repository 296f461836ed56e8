"""The text of speedrun.py, in one file: manuals, books, dictionaries and Python code out of Debian packages.

    python benchmarks/speedrun_corpus.py OUT [--packages FOLDER] [--megabytes N]

Downloads the packages listed below with apt-get (Debian 12; root is not needed), unpacks them without installing, and
writes OUT: a tar.xz of `text.jsonl` (one document a line), `tokenizer.json` (a byte-level BPE trained on it once) and
`facts.json` (versions, sizes, hashes). HTML loses its tags, manual pages stay as they are written. A paragraph of 60
characters or more is kept only where it is first seen, so that no held-out document repeats one that is trained on.
Every package gives an equal share at most, of documents chosen by their hashes. The same packages give the same bytes;
with newer ones the fingerprint differs from the recorded one, and the last line says so.
"""

import argparse
import gzip
import hashlib
import html
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from meshwright.data.tokenizer import train_tokenizer

RECORDED = Path(__file__).parent / "results" / "speedrun-corpus.json"
VOCABULARY = 32768
_PACKAGES = """
anarchism apache2-doc bash-doc bind9-doc cmake-doc cppreference-doc-en-html debian-faq debian-handbook debian-policy
debian-reference-en dict-foldoc dict-jargon dict-wn doc-debian emacs-el erlang-doc fortunes git-doc
glibc-doc haskell98-report installation-guide-amd64 libboost1.74-doc libglib2.0-doc libgtk-3-doc
libpython3.11-stdlib libreoffice-help-en-us linux-doc-6.1 manpages manpages-dev mutt nodejs-doc octave-doc
openjdk-17-doc perl-doc perl-modules-5.36 postfix-doc postgresql-doc-15 python-django-doc python-sqlalchemy-doc
python3-django python3-networkx python3-nltk python3-sympy python3-twisted python3.11-doc qtbase5-doc-html
r-doc-html rust-doc sqlite3-doc swi-prolog-doc tcl8.6-doc vim-runtime
"""
PACKAGES = _PACKAGES.split()
TEXT = (".txt", ".rst", ".md", ".pod", ".pm", ".pl", ".py", ".el", ".info", ".html", ".htm", ".dict", ".texi")
UNWANTED = re.compile(r"/(changelog|copyright|genindex|search|py-modindex)|/test(s|data)?/|/locale/")
LANGUAGE = re.compile(r"/([a-z]{2}[-_][A-Z]{2})/")
MANUAL = re.compile(r"/man/man\d/|/fortunes/[a-z]+$")
FEWEST, MOST, PARAGRAPH, SHORT_BLOCKS = 500, 200_000, 60, 4
"""Characters of a document, at least and at most (dictionaries become several); of a paragraph that is kept only once;
and how often a shorter block of HTML is kept per package."""
DROPPED = re.compile(r"(?is)<(script|style|head|nav|footer|svg)\b.*?</\1\s*>|<!--.*?-->")
BLOCK = re.compile(r"(?i)</?(p|div|li|ul|ol|tr|table|h\d|pre|dt|dd|dl|section|blockquote|br|hr|body)\b[^>]*>")
TAG = re.compile(r"<[^>]*>")


def main() -> None:
    """Download, unpack, clean, pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--packages", type=Path, help="a folder with the .deb files, which are then not downloaded")
    parser.add_argument("--megabytes", type=float, default=128.0, help="of text, at most")
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.packages or download(Path(temporary))
        debs = sorted(folder.glob("*.deb"))
        text, counts = written(debs, asked.megabytes * 1e6)
    tokenizer = trained(text)
    facts = {
        "packages": {deb.name: counts[deb.name] for deb in debs},
        "documents": sum(each["documents"] for each in counts.values()),
        "bytes": sum(each["bytes"] for each in counts.values()),
        "vocabulary": VOCABULARY,
        "text_sha256": hashlib.sha256(text).hexdigest(),
        "tokenizer_sha256": hashlib.sha256(tokenizer).hexdigest(),
    }
    described = json.dumps(facts, indent=1).encode() + b"\n"
    pack(asked.out, {"facts.json": described, "tokenizer.json": tokenizer, "text.jsonl": text})
    packed = asked.out.stat().st_size
    print(f"{facts['documents']:,} documents, {facts['bytes'] / 1e6:.1f} MB; packed {packed / 1e6:.1f} MB")
    print(against_recorded(facts))


def download(folder: Path) -> Path:
    """The newest released packages of Debian 12."""
    done = subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=folder, check=False)
    if done.returncode:
        sys.exit("apt-get could not download the packages; this needs Debian 12 and `apt-get update` before")
    return folder


def written(debs: list[Path], most: float) -> tuple[bytes, dict[str, dict[str, int]]]:
    """All documents as JSON lines, and how much each package gave."""
    lines, counts = io.BytesIO(), {}
    seen: set[bytes] = set()
    found_in = {deb.name: list(documents(deb, seen, most / 10)) for deb in debs}
    share = fair_share([sum(len(text) for _, text in found) for found in found_in.values()], most)
    for name, found in found_in.items():
        given = {"documents": 0, "bytes": 0}
        for path, text in found:
            if given["bytes"] >= share:
                break
            line = json.dumps({"text": text, "from": f"{name.split('_')[0]}{path}"}, ensure_ascii=False)
            lines.write(line.encode() + b"\n")
            given["documents"] += 1
            given["bytes"] += len(text.encode())
        counts[name] = given
        print(f"{name}: {given['documents']:,} documents, {given['bytes'] / 1e6:.2f} MB", flush=True)
    return lines.getvalue(), counts


def fair_share(sizes: list[int], most: float) -> float:
    """The most that a package may give so that all together give `most`."""
    left, share = most, 0.0
    for place, size in enumerate(sorted(sizes)):
        share = left / (len(sizes) - place)
        if size > share:
            return share
        left -= size
    return float("inf")


def documents(deb: Path, seen: set[bytes], most: float) -> Iterator[tuple[str, str]]:
    """Some documents of a package by the hash of their paths, each without paragraphs that were seen."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        subprocess.run(["dpkg-deb", "-x", str(deb), temporary], check=True)
        files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
        paths = ["/" + path.relative_to(root).as_posix() for path in files]
        wanted = [path for path in paths if is_text(path)]
        if any("/_sources/" in path for path in wanted):  # what the HTML next to it was made from
            wanted = [path for path in wanted if not path.endswith((".html", ".html.gz"))]
        total, short = 0, Counter[str]()
        for path in sorted(wanted, key=lambda path: hashlib.sha256(path.encode()).digest()):
            text = cleaned(path, (root / path[1:]).read_bytes(), seen, short)
            for start in range(0, len(text), MOST) if len(text) >= FEWEST else ():
                yield path, text[start : start + MOST]
            total += len(text)
            if total >= most:
                return


def is_text(path: str) -> bool:
    """Whether a file of a package is English text or code that people read."""
    plain, language = path.removesuffix(".gz").removesuffix(".dz"), LANGUAGE.search(path)
    if UNWANTED.search(plain) or (language and language[1] not in ("en-US", "en_US")):
        return False
    return bool(MANUAL.search(plain)) or plain.endswith(TEXT)


def cleaned(path: str, data: bytes, seen: set[bytes], short: Counter[str]) -> str:
    """A file as text: unpacked, without tags, without what was seen; nothing where it is not UTF-8."""
    if path.endswith((".gz", ".dz")):
        data = gzip.decompress(data)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return ""
    page = PurePosixPath(path.removesuffix(".gz")).suffix in (".html", ".htm")
    if page:
        text = html.unescape(TAG.sub("", BLOCK.sub("\n\n", DROPPED.sub(" ", text))))
    kept = []
    for paragraph in re.split(r"\n\s*\n", text.replace("\r\n", "\n").replace("\f", "\n")):
        paragraph = paragraph.rstrip() if not page else paragraph.strip()
        words = " ".join(paragraph.split())
        if not words:
            continue
        if len(words) < PARAGRAPH:
            short[words] += 1
            if page and short[words] > SHORT_BLOCKS:
                continue
        else:
            key = hashlib.blake2b(words.encode(), digest_size=10).digest()
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph.lstrip("\n"))
    return "\n\n".join(kept)


def trained(text: bytes) -> bytes:
    """The tokenizer that `meshwright data prepare` would train on the whole text."""
    texts = (json.loads(line)["text"] for line in text.splitlines())
    return train_tokenizer(texts, VOCABULARY).to_json().encode()


def pack(out: Path, files: dict[str, bytes]) -> None:
    """A tar.xz with nothing in it that depends on when or where it was made."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 27}]
    with lzma.open(out, "wb", filters=filters) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def against_recorded(facts: dict[str, Any]) -> str:
    """Whether this is the text that the recorded results belong to."""
    if not RECORDED.exists():
        return f"no recorded fingerprint; text {facts['text_sha256']}"
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    same = all(facts[key] == recorded[key] for key in ("text_sha256", "tokenizer_sha256"))
    return "the same text and tokenizer as recorded" if same else f"not the recorded text: {facts['text_sha256']}"


if __name__ == "__main__":
    main()
