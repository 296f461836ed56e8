"""Documents that cannot be used, counted by what is wrong with them, with the first places of each kind."""

from typing import Any

FIRST_PLACES = 5
NOT_UTF8, BROKEN_JSON, WRONG_FIELD, EMPTY, TOO_LONG = "not UTF-8", "broken JSON", "wrong field", "empty", "too long"
NO_CONVERSATION, NO_PAIR, NO_KEY = "no conversation", "no pair", "no key"


class BadDocuments:
    """Counts by kind; merging in the order of the input keeps the first places the first."""

    def __init__(self, told: dict[str, Any] | None = None) -> None:
        self._kinds: dict[str, tuple[int, list[str]]] = {
            kind: (entry["count"], list(entry["first"])) for kind, entry in (told or {}).items()
        }

    @property
    def count(self) -> int:
        """Bad documents of every kind."""
        return sum(count for count, _ in self._kinds.values())

    @property
    def against_limit(self) -> int:
        """Those that a limit is for: empty ones lose nothing."""
        return self.count - self._kinds.get(EMPTY, (0, []))[0]

    def add(self, kind: str, place: str) -> None:
        """One more; its place may quote a record, halves of surrogate pairs included, which no manifest can hold."""
        self._merge(kind, 1, [place.encode("utf-8", "backslashreplace").decode("utf-8")])

    def merge(self, other: "BadDocuments") -> None:
        """Those of a later part of the input."""
        for kind, (count, places) in other._kinds.items():
            self._merge(kind, count, places)

    def told(self) -> dict[str, Any]:
        """As plain values, for the manifest."""
        return {kind: {"count": count, "first": places} for kind, (count, places) in sorted(self._kinds.items())}

    def sentence(self) -> str:
        """Kinds, counts and the first place of each, as part of a sentence; the empty ones only where all are."""
        kinds = sorted(kind for kind in self._kinds if kind != EMPTY or not self.against_limit)
        return "; ".join(f"{self._kinds[kind][0]} {kind}, first at {self._kinds[kind][1][0]}" for kind in kinds)

    def _merge(self, kind: str, count: int, places: list[str]) -> None:
        had, first = self._kinds.get(kind, (0, []))
        self._kinds[kind] = (had + count, (first + places)[:FIRST_PLACES])
