"""What every section of a job has in common: frozen, strict about names, finite numbers, plain text, documented."""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from meshwright.job.sanitize import odd_character, secret_in

_LONGEST = 4096
"""The longest path, in bytes, that Linux accepts."""


class Section(BaseModel):
    """A frozen table of a job file; the docstring under each field is its description in `job explain`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    prose: ClassVar[frozenset[str]] = frozenset()
    """Fields whose text only the model reads: they may contain line ends."""

    @field_validator("*", mode="after")
    @classmethod
    def _plain_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Names and paths end up in scripts, file names and run files that others may read."""
        prose = info.field_name in cls.prose
        for text in _texts(value):
            if odd := odd_character(text, prose):
                raise PydanticCustomError("plain_text", "It may not contain the control character {odd}", {"odd": odd})
            if len(text.encode()) > _LONGEST:
                raise PydanticCustomError("plain_text", "It may have at most {most} bytes", {"most": _LONGEST})
            if not prose and (secret := secret_in(text)):
                raise PydanticCustomError(
                    "plain_text",
                    "Run files would show {secret}; keep credentials in your environment, or fetch the file yourself",
                    {"secret": secret},
                )
        return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for part in pair for text in _texts(part))
    elif isinstance(value, list | tuple):
        yield from (text for part in value for text in _texts(part))
