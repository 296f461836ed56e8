from collections.abc import Callable
from pathlib import Path

import pytest
from data_texts import text_of

from meshwright.data import Corpus, prepare
from meshwright.job.data import Data


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], str]:
    """Writes a source file below the test's folder and returns its path."""

    def write_file(name: str, content: str | bytes) -> str:
        path = tmp_path / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write_file


@pytest.fixture
def prepare_from(tmp_path: Path) -> Callable[..., Corpus]:
    """Prepares sources into the test's own cache with a vocabulary of 300."""

    def prepare_sources(*sources: str, vocab_size: int = 300, report=None, **fields) -> Corpus:
        data = Data(sources=sources, **{"cache": str(tmp_path / "cache"), **fields})
        return prepare(data, vocab_size, report)

    return prepare_sources


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Forty small documents, prepared once."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(text_of(number))
    return prepare(Data(sources=(str(folder),), cache=str(folder / "cache"), validation_fraction=0.2), 300)
