"""One attempt of a run: a placement group, a host on each of its bundles, and the ranks they start."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Self

from meshwright.errors import UserError
from meshwright.launch.rank_failure import RankFailure
from meshwright.launch.ray.host import Host
from meshwright.launch.ray.placement import Split
from meshwright.launch.ray.record import Submission

_LOOK_S = 0.2
_ANSWER_S = 120.0
"""How long a machine may take to start a process of Ray's, from a shared disk."""
_GRACE_S = 10.0
"""How long the other ranks may take to end by themselves once some have failed."""


class LostHost(RankFailure):
    """A machine, its raylet or the actor there is gone."""


class Attempt:
    """A context manager: afterwards no process and no reservation is left."""

    def __init__(self, ray: Any, asked: Submission, split: Split) -> None:
        self._ray, self._asked, self.split = ray, asked, split
        self._group: Any = None
        self._hosts: list[Any] = []
        self._codes: dict[int, int] = {}
        self._failed_at: float | None = None

    def reserve(self, patience_s: float, give_up: Callable[[], bool]) -> bool:
        """Reserve all bundles, or none."""
        from ray.util.placement_group import placement_group

        self._group = placement_group(self.split.resources(self._asked.gpus), strategy="PACK")
        deadline = time.monotonic() + patience_s
        while not self._group.wait(_LOOK_S):
            if time.monotonic() > deadline or give_up():
                self._release()
                return False
        return True

    def start(self, number: int) -> str:
        """Start a host per bundle and its ranks; returns the machines' addresses."""
        from ray.util.placement_group import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # Ranks are numbered by machine: neighbours in the layout are on the same one where possible.
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        order = sorted(range(self.split.bundles), key=lambda bundle: (nodes[bundle], bundle))
        resources = self.split.resources(self._asked.gpus)[0]
        actor = self._ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), max_restarts=0)(Host)
        for bundle in order:
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            self._hosts.append(actor.options(scheduling_strategy=where).remote(self._asked))
        facts = self._ask([host.facts.remote() for host in self._hosts])
        if error := next((fact.error for fact in facts if fact.error), None):
            raise UserError(error)
        master = f"{facts[0].address}:{facts[0].free_port}"
        each = self.split.ranks_per_bundle
        places = [(rank, len(self._hosts), master) for rank in range(len(self._hosts))]
        self._ask([host.start.remote(number, place, each) for host, place in zip(self._hosts, places, strict=True)])
        return ", ".join(sorted({fact.address for fact in facts}))

    def _ask(self, answers: list[Any]) -> list[Any]:
        """What all hosts answer; raises if one of them is gone."""
        from ray.exceptions import GetTimeoutError, RayError

        try:
            return list(self._ray.get(answers, timeout=_ANSWER_S))
        except GetTimeoutError:
            raise LostHost(f"a machine has not answered for {_ANSWER_S:.0f} s", None, "") from None
        except RayError as error:
            if "No module named 'meshwright" in str(error):
                version = self._asked.version
                raise UserError(
                    f"a machine of the cluster has no meshwright {version}; install it there, or add --ship"
                ) from None
            raise LostHost("a machine or its raylet was lost", None, str(error)) from None

    def running(self, recorded: Callable[[], bool]) -> Literal[True] | list[int]:
        """True while ranks run, then the exit codes of all hosts; raises once a host is gone and the others ended.

        `recorded` says whether the run folder shows an end: then agents that still run only wait for the lost one.
        """
        from ray.exceptions import RayError

        lost: dict[int, Exception] = {}
        for number, host in enumerate(self._hosts):
            if number in self._codes:
                continue
            try:
                code = self._ray.get(host.poll.remote(), timeout=_ANSWER_S)
            except RayError as error:
                lost[number] = error
                continue
            if code is not None:
                self._codes[number] = code
        late = self._late(bool(lost) or any(self._codes.values()))
        ended = len(self._codes) + len(lost) == len(self._hosts)
        if lost and (ended or late or recorded()):
            raise LostHost("a machine or its raylet was lost", None, str(next(iter(lost.values()))))
        if not ended:
            if late:
                self._kill()
            return True
        return list(self._codes.values())

    def _late(self, failed: bool) -> bool:
        """Whether ranks still run although the others failed a while ago: they wait for messages that never come."""
        if failed and self._failed_at is None:
            self._failed_at = time.monotonic()
        return self._failed_at is not None and time.monotonic() - self._failed_at > _GRACE_S

    def _kill(self) -> None:
        from ray.exceptions import RayError

        for ending in [host.kill.remote() for host in self._hosts]:
            with suppress(RayError):
                self._ray.get(ending, timeout=_GRACE_S)

    def _release(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
        self._group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        for host in self._hosts:
            self._ray.kill(host)
        self._release()
