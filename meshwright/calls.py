"""Packages that are also functions of the Python API: `meshwright.plan(job)` beside `from meshwright.plan import X`.

Importing a package puts it into its parent as an attribute, over a function of the same name and at any time. So the
package itself is made callable: both spellings then work whatever was imported first.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def callable_as(module: str, place: str, function: str) -> None:
    """Let a module be called as a function of a higher room, which is imported at the first call and not before."""

    class CallableModule(ModuleType):
        def __call__(self, *args: Any, **named: Any) -> Any:
            return getattr(import_module(place), function)(*args, **named)

    sys.modules[module].__class__ = CallableModule
