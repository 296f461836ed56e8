"""Manifests and task files as YAML that people can read."""

import re
from collections.abc import Sequence
from typing import Any

_UNQUOTED = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]+")


def yaml_text(documents: Sequence[dict[str, Any]], title: str) -> str:
    """The documents one after the other, under a comment."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # the package has no types
        def ignore_aliases(self, data: Any) -> bool:
            return True  # & and * are hard to read, and some tools reject them

    def string(dumper: Any, text: str) -> Any:
        if "\n" in text:
            return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
        # Parsers differ in what they take for a number, a date or a truth value.
        style = None if _UNQUOTED.fullmatch(text) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, string)
    parts = [yaml.dump(part, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120) for part in documents]
    return f"# {title}\n" + "---\n".join(parts)
