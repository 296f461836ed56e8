"""One machine of several: torch's agent runs on each, and they connect at an address known beforehand."""

import re
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from meshwright.errors import UserError

MEETING_S = 900
"""Seconds that machines wait for each other: starting Python from a shared disk may take a while."""


@dataclass(frozen=True)
class Node:
    """This machine's place among the others; the only one by default."""

    rank: int = 0
    nodes: int = 1
    master: str | None = None
    """host:port of the first machine."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.nodes:
            raise UserError(f"--node-rank {self.rank} is not one of --nodes {self.nodes}; machines are numbered from 0")
        host, colon, port = (self.master or "alone:1").rpartition(":")
        if not (host and colon and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 2**16):
            raise UserError(f"--master {self.master} is not host:port; give the first machine's name and a free port")

    @property
    def suffix(self) -> str:
        """Suffix that distinguishes this machine's files from the others'."""
        return "" if self.master is None else f"-{self.rank}"

    def rendezvous(self) -> dict[str, Any]:
        """How the agents connect: alone at any free port, else at the first machine, ranks in the order of machines."""
        if self.master is None:
            endpoint = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
            return {"run_id": uuid4().hex, **endpoint}
        configs = {"rank": self.rank, "timeout": MEETING_S}
        return {"run_id": "meshwright", "rdzv_backend": "static", "rdzv_endpoint": self.master, "rdzv_configs": configs}


ALONE = Node()
