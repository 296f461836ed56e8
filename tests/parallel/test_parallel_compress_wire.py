"""The bytes a compressed reduction counts are those that leave the machine: two ranks in two network namespaces."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SPACES, ADDRESSES = ("meshwright-test-0", "meshwright-test-1"), ("10.99.9.1", "10.99.9.2")
RANK = """
import json
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from meshwright.job.devices import Layout
from meshwright.parallel.compress import Reduction

def interface_bytes():
    return int(Path("/sys/class/net/wire/statistics/tx_bytes").read_text())

torch.set_num_threads(1)
dist.init_process_group("gloo")
master = nn.Parameter(torch.zeros(1024, 1024))
seen = {}
for layout in ({"compress": "none"}, {"compress": "int8"}, {"compress": "topk", "compress_ratio": 0.1},
               {"compress": "powersgd", "compress_rank": 16}):
    master.grad = torch.randn(1024, 1024)
    plain = layout["compress"] == "none"
    reduction = None if plain else Reduction({"weight": master}, Layout(bucket_mb=1.0, **layout), dist.group.WORLD)
    dist.barrier()
    before = interface_bytes()
    if reduction is None:
        dist.all_reduce(master.grad)
    else:
        reduction.reduce({"weight": master})
    dist.barrier()
    sent = interface_bytes() - before
    seen[layout["compress"]] = (4 * 1024 * 1024 if plain else reduction.sent.bytes, sent)
print(json.dumps(seen))
"""


@pytest.fixture
def namespaces() -> Iterator[None]:
    """Two network namespaces joined by a wire; only root may make them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")

    def ip(words: str, check: bool = True) -> int:
        return subprocess.run(["ip", *words.split()], check=check, stderr=subprocess.DEVNULL).returncode

    if ip(f"netns add {SPACES[0]}", check=False):
        pytest.skip("network namespaces are not allowed here")
    try:
        ip(f"netns add {SPACES[1]}")
        ip(f"link add wire netns {SPACES[0]} type veth peer name wire netns {SPACES[1]}")
        for space, address in zip(SPACES, ADDRESSES, strict=True):
            ip(f"-n {space} addr add {address}/24 dev wire")
            ip(f"-n {space} link set wire mtu 9000 up")
            ip(f"-n {space} link set lo up")
        yield
    finally:
        for space in SPACES:
            ip(f"netns del {space}", check=False)


@pytest.mark.usefixtures("namespaces")
def test_counted_bytes_are_those_of_the_interface() -> None:
    ranks = []
    for rank, space in enumerate(SPACES):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511",
            "GLOO_SOCKET_IFNAME": "wire", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]),
        }  # fmt: skip
        command = ["ip", "netns", "exec", space, sys.executable, "-W", "ignore", "-c", RANK]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    for output in outputs:
        seen = json.loads(output.strip().splitlines()[-1])
        assert set(seen) == {"none", "int8", "topk", "powersgd"}
        for compress, (counted, sent) in seen.items():
            # Headers, acknowledgements and two barriers come on top: a few percent, and some thousand bytes.
            assert counted < sent < 1.03 * counted + 20_000, (compress, counted, sent)
        ratios = {compress: seen["none"][1] / sent for compress, (_, sent) in seen.items()}
        assert ratios["int8"] == pytest.approx(4 / (1 + 4 / 256), rel=0.05)
        assert ratios["topk"] == pytest.approx(4 / (0.1 * 6), rel=0.05)
        assert ratios["powersgd"] == pytest.approx(1024 / 32, rel=0.25)
