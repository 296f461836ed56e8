"""What every section of a job has in common: frozen, strict about names, documented under each field."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen table of a job file; the docstring under each field is its one line of meaning in `job explain`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())
