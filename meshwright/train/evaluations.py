"""Evaluation during a run: the held-out loss, the named sets, and a text sample."""

import math
from typing import cast

from meshwright.data import Corpus, References
from meshwright.job import Job
from meshwright.model import Decoder
from meshwright.parallel import Engine, PipeDream, World
from meshwright.train.evaluate import evaluate, score
from meshwright.train.feed import evaluates, held_out_batches, set_batches
from meshwright.train.generate import generate
from meshwright.train.outcome import Outcome
from meshwright.train.preference import score_pairs
from meshwright.train.recorder import Progress, Recorder


class Evaluations:
    """One run's evaluations, recorded and printed."""

    def __init__(
        self,
        job: Job,
        corpus: Corpus,
        engine: Engine | PipeDream,
        recorder: Recorder,
        progress: Progress,
        world: World,
    ) -> None:
        self._job, self._corpus, self._engine = job, corpus, engine
        self._recorder, self._progress, self._world = recorder, progress, world
        self.references: References | None = None
        """What the reference gives held-out pairs, if the loss is one over pairs."""

    def run(self, step: int, outcome: Outcome, attempt: int) -> None:
        """Run all evaluations due after a step; all ranks call this together."""
        if evaluates(self._job):
            self._held_out(step, outcome, attempt)
        if self._job.evaluation.every_steps:
            for name in self._job.evaluation.sets:
                self._set(step, name, attempt)

    def _held_out(self, step: int, outcome: Outcome, attempt: int) -> None:
        batches, row = held_out_batches(self._job, self._corpus), dict[str, float]()
        if self._job.prefers:
            assert self.references is not None
            engine, settings = cast(Engine, self._engine), self._job.preference
            found = score_pairs(engine, batches, self._world, self.references, settings)
            val_loss = found.loss
            row = {"val_accuracy": found.accuracy, "val_margin": found.reward_chosen - found.reward_rejected}
        else:
            val_loss = evaluate(self._engine, batches, self._world)
        outcome.val_loss = val_loss
        if outcome.first_val_loss is None:
            outcome.first_val_loss = val_loss
        self._recorder.metric({"step": step, "val_loss": val_loss, **row, "attempt": attempt})
        self._progress.evaluation(step, val_loss)
        if row:
            pairs = f"{row['val_accuracy']:.1%} of held-out pairs in the right order, margin {row['val_margin']:.4f}"
            self._progress.message(f"step {step}/{self._job.run.steps}  {pairs}")
        # A model split over ranks returns losses, not logits to sample from; `generate` reads the saved weights.
        if step and math.isfinite(val_loss) and self._world.size == 1:
            self._sample(step, outcome)

    def _set(self, step: int, name: str, attempt: int) -> None:
        tokenizer = self._corpus.tokenizer
        lengths = None if tokenizer is None else tokenizer.byte_lengths()
        found = score(self._engine, set_batches(self._job, self._corpus, name), self._world, lengths)
        row = {"set_loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
        self._recorder.metric({"step": step, "set": name, **row, "attempt": attempt})
        bits = "" if found.bits_per_byte is None else f"  bits per byte {found.bits_per_byte:.4f}"
        self._progress.message(f"step {step}/{self._job.run.steps}  {name}: loss {found.loss:.4f}{bits}")

    def _sample(self, step: int, outcome: Outcome) -> None:
        tokenizer, settings = self._corpus.tokenizer, self._job.evaluation
        # Drawings have no text of their own to continue.
        drawn = self._corpus.windows is not None
        if tokenizer is None or not settings.sample_tokens or self._job.model.file or drawn:
            return
        prompt = tokenizer.encode(settings.sample_prompt) or [tokenizer.end_of_text]
        room = self._job.model.max_sequence_length - len(prompt)
        written = generate(
            cast(Decoder, self._engine.modules[0]),
            prompt,
            max(0, min(settings.sample_tokens, room)),
            seed=self._job.run.seed,
            stop={tokenizer.end_of_text},
            vocab_size=tokenizer.vocab_size,
        )
        outcome.sample = tokenizer.decode(prompt + written)
        self._recorder.sample(step, outcome.sample)
