"""For tests that count what a rank holds."""

import gc
import time


def collect_settled() -> None:
    """Collect garbage once gloo's threads have let go of what they have just sent or reduced, which is up to chance."""
    time.sleep(0.1)
    gc.collect()
