"""Fields that hold numbers of tokens: a number, or a text as people write it (`"15T"`)."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, NonNegativeInt, PositiveInt
from pydantic_core import CoreSchema, PydanticCustomError

from meshwright.amounts import NoAmount, length, tokens


def _read(read: Callable[[Any], int]) -> BeforeValidator:
    """A text or a whole float as an int; anything else is left to validation."""

    def given(value: Any) -> Any:
        if not isinstance(value, str | float):
            return value
        try:
            return read(value)
        except NoAmount as error:
            raise PydanticCustomError("amount", "{how}", {"how": str(error)}) from None

    return BeforeValidator(given)


class _AlsoText:
    """In the schema, for editors: a number, or a text."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{**handler(core), "type": "number"}, {"type": "string", "pattern": r"^\s*\d"}]}


TokenCount = Annotated[PositiveInt, Field(le=10**18), _read(tokens), _AlsoText()]
SampleTokens = Annotated[NonNegativeInt, Field(le=10**6), _read(tokens), _AlsoText()]
SequenceLength = Annotated[PositiveInt, Field(le=10**8), _read(length), _AlsoText()]
