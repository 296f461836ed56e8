"""Methods of objects replaced for a while, and put back."""

from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]


class Around:
    """Replaces methods on single objects; `undo` restores every one."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, replacement: Callable[[Call], Call]) -> None:
        """Let `owner.name` be what `replacement` makes of it."""
        own = vars(owner).get(name)
        setattr(owner, name, replacement(getattr(owner, name)))
        self._undo.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def undo(self) -> None:
        """Restore everything, the last replacement first."""
        while self._undo:
            self._undo.pop()()
