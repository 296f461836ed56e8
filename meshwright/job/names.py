"""Fields that hold the name of something: built in, registered in this process, or of an installed package."""

from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

from meshwright.registries import LOSSES, OPTIMIZERS, SCHEDULES, SINKS, Registry


def _schema(registry: Registry) -> WithJsonSchema:
    """Editors offer what is built in, and let other names stand."""
    return WithJsonSchema({"anyOf": [{"enum": list(registry.built_in)}, {"type": "string"}]})


OptimizerName = Annotated[str, AfterValidator(OPTIMIZERS.require), _schema(OPTIMIZERS)]
ScheduleName = Annotated[str, AfterValidator(SCHEDULES.require), _schema(SCHEDULES)]
LossName = Annotated[str, AfterValidator(LOSSES.require), _schema(LOSSES)]
SinkName = Annotated[str, AfterValidator(SINKS.require), _schema(SINKS)]

Settings = dict[str, bool | Annotated[int, Field(le=10**18)] | Annotated[float, Field(le=1e18)] | str]
"""What a thing of one's own is given beside the fields that all of its kind have."""
