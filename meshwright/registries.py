"""What users add under names of their own: optimizers, learning-rate schedules, losses, data sources, metric sinks.

A job names them as it names what is built in. A name is known once it is registered in this process, or where an
installed package has an entry point of that name; that is imported when something of the job first needs it. A job can
therefore run only what is registered or installed, never a file that it names.
"""

import re
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from meshwright.errors import UserError

T = TypeVar("T")
_NAME = re.compile(r"[a-z][a-z0-9_-]*")


class Registry:
    """One kind of thing by name: built in, registered in this process, or an entry point of an installed package."""

    def __init__(
        self, kind: str, group: str, field: str, built_in: tuple[str, ...], fault: Callable[[Any], str | None]
    ) -> None:
        self.kind, self.group, self.built_in = kind, group, built_in
        self._field, self._fault = field, fault
        self._registered: dict[str, Any] = {}
        self.changes = 0
        """How often something was registered: what was computed with an earlier one under its name is void."""

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that makes something known under a name; registering a name again replaces it."""
        if _NAME.fullmatch(name) is None or name in self.built_in:
            why = "is built in" if name in self.built_in else "is no name of lower-case letters, digits, - and _"
            raise UserError(f'the {self.kind} name "{name}" {why}; choose another')

        def registered(thing: T) -> T:
            if fault := self._fault(thing):
                raise UserError(f'the {self.kind} "{name}" {fault}')
            self._registered[name] = thing
            self.changes += 1
            return thing

        return registered

    def require(self, name: str) -> str:
        """The name itself where something is known under it; a ValueError lists what is known. Imports nothing."""
        if not self.has(name):
            known = ", ".join(self.names())
            raise ValueError(
                f'{self._field} has "{name}", which is not known; choose one of {known}, or install or register it'
            )
        return name

    def has(self, name: str) -> bool:
        """Whether something is known under the name."""
        return name in self.built_in or self.is_own(name)

    def is_own(self, name: str) -> bool:
        """Whether it is not built in but registered or installed."""
        return name in self._registered or name in entry_points(group=self.group).names

    def is_installed(self, name: str) -> bool:
        """Whether a new process of this Python knows it too."""
        return name in self.built_in or name in entry_points(group=self.group).names

    def names(self) -> list[str]:
        """Every known name, built-in ones first."""
        own = {*self._registered, *entry_points(group=self.group).names}
        return [*self.built_in, *sorted(own - set(self.built_in))]

    def find(self, name: str) -> Any:
        """What was added under a name; an entry point is imported now."""
        if name not in self._registered:
            found = next(iter(entry_points(group=self.group, name=name)), None)
            if found is None:
                try:
                    self.require(name)
                except ValueError as error:
                    raise UserError(str(error)) from None
                raise KeyError(name)  # built in: whoever asks has it
            try:
                thing = found.load()
            except Exception as error:
                raise UserError(
                    f'{self._field} has "{name}", whose package cannot be imported ({type(error).__name__}: {error}); '
                    f"fix or reinstall {found.value}"
                ) from error
            self.register(name)(thing)
        return self._registered[name]


def _optimizer_fault(thing: Any) -> str | None:
    if not isinstance(getattr(thing, "elementwise", None), bool):
        return (
            "does not say whether it updates every entry by itself; set elementwise = True in the class, or False "
            "where it needs whole matrices"
        )
    states = getattr(thing, "states", None)
    if not isinstance(states, tuple) or not all(isinstance(name, str) for name in states):
        return 'does not say what it keeps for every entry; set states in the class, as states = ("momentum",)'
    return None if callable(thing) else "is no class; register one"


def _call_fault(thing: Any) -> str | None:
    return None if callable(thing) else "cannot be called; register a function or a class"


OPTIMIZERS = Registry(
    "optimizer",
    "meshwright.optimizers",
    "optimizer.name",
    ("adamw", "sgd", "adafactor", "lion", "muon"),
    _optimizer_fault,
)
SCHEDULES = Registry("schedule", "meshwright.schedules", "schedule.name", ("cosine", "wsd", "constant"), _call_fault)
LOSSES = Registry("loss", "meshwright.losses", "model.loss", ("cross-entropy",), _call_fault)
SOURCES = Registry("source", "meshwright.sources", "data.sources", ("builtin",), _call_fault)
SINKS = Registry("sink", "meshwright.sinks", "log.sinks", ("wandb", "tensorboard", "mlflow"), _call_fault)

register_optimizer = OPTIMIZERS.register
register_schedule = SCHEDULES.register
register_loss = LOSSES.register
register_source = SOURCES.register
register_sink = SINKS.register


def own_state_bytes(optimizer: str) -> float | None:
    """Bytes an optimizer of one's own keeps for each parameter, in fp32; None for one that is built in."""
    if optimizer in OPTIMIZERS.built_in:
        return None
    found = OPTIMIZERS.find(optimizer)
    return float(getattr(found, "state_bytes", 4.0 * len(found.states)))
