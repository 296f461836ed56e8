"""The [preference] section: how a chosen and a rejected answer become a loss."""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from meshwright.job.section import Section

if TYPE_CHECKING:
    from meshwright.job.job import Job


class Preference(Section):
    """The loss over pairs of answers, read with data.format = "preferences"; a mean over the pairs of a step."""

    loss: Literal["dpo", "ipo", "orpo"] = "dpo"
    """dpo: the sigmoid loss of direct preference optimisation; ipo: a squared distance of mean log-ratios; orpo: the
    chosen answer's own loss and a ratio of odds, without a reference."""
    beta: PositiveFloat = Field(default=0.1, le=1e6)
    """dpo, ipo: how strongly the model is held to the reference, its start weights; orpo: the weight of the odds."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """dpo only: the share of pairs assumed to be labelled the wrong way round."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with its start weights."""
        return self.loss != "orpo"

    @model_validator(mode="after")
    def _smoothing_fits(self) -> Self:
        if self.label_smoothing and self.loss != "dpo":
            raise ValueError(
                f"preference.label_smoothing = {self.label_smoothing:g} is for preference.loss = "
                f'"dpo" and not for "{self.loss}"; leave it out'
            )
        return self


def require_preferences(job: "Job") -> None:
    """Refuse what preference training does not support."""
    if job.data.format != "preferences":
        return
    beside = 'data.format = "preferences"'
    if job.model.file is not None:
        raise ValueError(
            f"model.file = {job.model.file} computes its own loss, which excludes {beside}; leave one of them out"
        )
    if job.model.loss != "cross-entropy":
        raise ValueError(
            f'model.loss = "{job.model.loss}" is a loss of tokens, which excludes {beside}; leave one of them out'
        )
    if job.model.extra_tokens:
        raise ValueError(
            f"model.extra_tokens = {job.model.extra_tokens} adds losses of tokens, which excludes {beside}; set "
            "model.extra_tokens = 0"
        )
    if job.model.encoder is not None:
        section = job.model.encoder.section
        raise ValueError(f"model.{section} with {beside} is not supported yet; leave one of them out")
    if job.evaluation.sets:
        raise ValueError(
            f"evaluation.sets has {', '.join(job.evaluation.sets)}, texts with a loss of tokens, which excludes "
            f"{beside}; leave them out and use meshwright eval --data"
        )
    if job.layout.pp > 1 and job.layout.schedule == "pipedream":
        raise ValueError(
            f'layout.schedule = "pipedream" updates stages before a pair\'s loss is known, which excludes {beside}; '
            'set layout.schedule = "1f1b"'
        )
