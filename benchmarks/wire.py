"""Two "hosts" on one machine: network namespaces and a link that can be slow or cut. Needs root, ip and tc."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

ADDRESSES = ("10.99.8.1", "10.99.8.2")
_PORT = "29508"


class Wire:
    """The namespaces and the link, for as long as the context lasts; `rate` as tc spells it, `200mbit`."""

    def __init__(self, rate: str | None = None, mtu: int = 1500) -> None:
        self.spaces = tuple(f"mw-wire-{os.getpid()}-{number}" for number in range(2))
        self._rate, self._mtu = rate, mtu

    def __enter__(self) -> Self:
        try:
            self._lay()
        except subprocess.CalledProcessError:
            self.__exit__()
            raise
        return self

    def _lay(self) -> None:
        for space in self.spaces:
            _shell(f"ip netns add {space}")
        _shell(f"ip link add wire netns {self.spaces[0]} type veth peer name wire netns {self.spaces[1]}")
        for space, address in zip(self.spaces, ADDRESSES, strict=True):
            _shell(f"ip -n {space} addr add {address}/24 dev wire && ip -n {space} link set wire mtu {self._mtu} up")
            _shell(f"ip -n {space} link set lo up")
            if self._rate:
                _shell(f"tc -n {space} qdisc add dev wire root tbf rate {self._rate} burst 128kb limit 20mb")

    def __exit__(self, *_: object) -> None:
        for space in self.spaces:
            subprocess.run(f"ip netns del {space}", shell=True, stderr=subprocess.DEVNULL, check=False)

    def cut(self) -> None:
        """Silently drop everything: a bucket too small for any packet."""
        for space in self.spaces:
            _shell(f"tc -n {space} qdisc add dev wire root tbf rate 8bit burst 10b limit 10b")

    def restore(self) -> None:
        """Let everything through again."""
        for space in self.spaces:
            _shell(f"tc -n {space} qdisc del dev wire root")

    def run_pair(self, words: list[str], timeout_s: float) -> list[str]:
        """What two ranks print, one on each host with its own core; `words` follow the interpreter."""
        ranks = []
        for rank, space in enumerate(self.spaces):
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": _PORT, "GLOO_SOCKET_IFNAME": "wire", "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).parents[1]),
            }  # fmt: skip
            command = ["ip", "netns", "exec", space, "taskset", "-c", str(rank % (os.cpu_count() or 1))]
            command += [sys.executable, "-W", "ignore", *words]
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
        if codes := [rank.returncode for rank in ranks if rank.returncode]:
            raise RuntimeError(f"a rank ended with code {codes[0]}")
        return outputs


def _shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True)
