"""Where a rank's main thread is, for a watchdog in another thread."""


class Activity:
    """A phase and a step, and a counter that grows with every change."""

    def __init__(self) -> None:
        self.phase, self.step, self.moves = "starting", 0, 0
        self.warm = False
        """Whether a whole step is done: the first one allocates, compiles and connects, and takes longer."""

    def restart(self) -> None:
        """Everything is rebuilt, and the next step counts as a first one again."""
        self.step, self.warm = 0, False
        self.at("starting")

    def at(self, phase: str, step: int | None = None) -> None:
        """The main thread enters a phase."""
        if step is not None:
            self.warm = self.warm or (self.step > 0 and step > self.step)
            self.step = step
        self.phase = phase
        self.moves += 1
