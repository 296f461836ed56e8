"""Where a rank's main thread is, for whoever watches it from another thread."""


class Activity:
    """A phase and a step, and a number that grows with every move from one to the next."""

    def __init__(self) -> None:
        self.phase, self.step, self.moves = "starting", 0, 0
        self.warm = False
        """Whether a whole step was made: the first allocates, compiles and connects, and takes its time."""

    def restart(self) -> None:
        """Everything is built anew, and the next step is a first one again."""
        self.step, self.warm = 0, False
        self.at("starting")

    def at(self, phase: str, step: int | None = None) -> None:
        """The main thread begins something."""
        if step is not None:
            self.warm = self.warm or (self.step > 0 and step > self.step)
            self.step = step
        self.phase = phase
        self.moves += 1
