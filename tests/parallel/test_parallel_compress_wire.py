"""The bytes a compressed reduction counts are those that leave the machine: two ranks in two network namespaces."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from wire import Wire

MTU = 9000
PACKET = MTU + 14
"""Bytes of a full packet on the wire."""
RANK = """
import json
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from meshwright.job.devices import Layout
from meshwright.parallel.compression.weights import Reduction

def interface_bytes():
    return int(Path("/sys/class/net/wire/statistics/tx_bytes").read_text())

def sent_again():
    lines = Path("/proc/self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])

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
    before, again = interface_bytes(), sent_again()
    if reduction is None:
        dist.all_reduce(master.grad)
    else:
        reduction.reduce({"weight": master})
    dist.barrier()
    sent = interface_bytes() - before
    seen[layout["compress"]] = (4 * 1024 * 1024 if plain else reduction.sent.bytes, sent, sent_again() - again)
print(json.dumps(seen))
"""


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Two network namespaces joined by a wire; only root may make them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")
    with ExitStack() as stack:
        try:
            laid = stack.enter_context(Wire(mtu=MTU))
        except subprocess.CalledProcessError:
            pytest.skip("network namespaces are not allowed here")
        yield laid


@pytest.mark.thorough
def test_counted_bytes_are_those_of_the_interface(wire: Wire) -> None:
    outputs = wire.run_pair(["-c", RANK], timeout_s=120)
    for output in outputs:
        seen = json.loads(output.strip().splitlines()[-1])
        assert set(seen) == {"none", "int8", "topk", "powersgd"}
        for compress, (counted, sent, again) in seen.items():
            # Headers, acknowledgements and two barriers come on top: a few percent, and some thousand bytes. So does
            # what TCP sends twice when the other host's core is busy.
            assert counted < sent < 1.03 * counted + 20_000 + again * PACKET, (compress, counted, sent, again)
        once = {compress: sent - again * PACKET for compress, (_, sent, again) in seen.items()}
        ratios = {compress: once["none"] / sent for compress, sent in once.items()}
        assert ratios["int8"] == pytest.approx(4 / (1 + 4 / 256), rel=0.05)
        assert ratios["topk"] == pytest.approx(4 / (0.1 * 6), rel=0.05)
        assert ratios["powersgd"] == pytest.approx(1024 / 32, rel=0.25)
