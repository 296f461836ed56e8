"""Which Ray cluster a command connects to; no cluster runs."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.launch.ray.connection import NoCluster, connect


@pytest.fixture
def current_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ray's file with the address of the cluster last started; Ray itself would try to connect for minutes."""
    ray = pytest.importorskip("ray")

    def init(**_: Any) -> None:
        raise AssertionError("Ray is asked to connect")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    return file


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_stale_file_of_an_earlier_cluster_is_named(current_cluster: Path, address: str | None) -> None:
    current_cluster.write_text("127.0.0.3:9\n")
    with pytest.raises(NoCluster) as refused:
        connect(address)
    assert str(refused.value) == (
        f"127.0.0.3:9 does not answer (Connection refused), and {current_cluster} names it as the cluster of this "
        "machine; start one with `ray start --head`, give --address HOST:PORT, or remove that file"
    )


def test_a_file_without_an_address_is_named(current_cluster: Path) -> None:
    current_cluster.write_text("")
    with pytest.raises(NoCluster, match=f"is not HOST:PORT, and {current_cluster} names it"):
        connect()
