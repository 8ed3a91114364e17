"""Keys, configs, samples, tables and the look-up; and, called, the decorator `sw.autotune`.

`stoneware.autotune` is this package and `sw.autotune(...)` a call, so the module of the package is
one that can be called: `import stoneware.autotune.key` binds it to the name, whichever comes first.
"""

from __future__ import annotations

import sys
from types import ModuleType

TYPE_CHECKING = False  # typing's own, without the cost of importing typing
if TYPE_CHECKING:
    from typing import Any


class _CallablePackage(ModuleType):
    """A module that stands for its decorator, too."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`stoneware.autotune.decorator.autotune`: see there."""
        from stoneware.autotune.decorator import autotune

        return autotune(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
