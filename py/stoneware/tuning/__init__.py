"""sw.tuning(mode, *, overlay=None, batch_invariant=None): see help(stoneware.tuning.context.tuning).

The package has samples, the store, tables and the look-up.

`stoneware.tuning` is this package and `sw.tuning(...)` a call, so the module of the package is one
that can be called: `import stoneware.tuning.table` binds it to the name, whichever comes first.
"""

from __future__ import annotations

import sys
from types import ModuleType

TYPE_CHECKING = False  # typing's own, without the cost of importing typing
if TYPE_CHECKING:
    from typing import Any

    from stoneware.tuning.decorator import DecoratingScope


class _CallablePackage(ModuleType):
    """A module that is also called like its context manager."""

    def __call__(self, *args: Any, **kwargs: Any) -> DecoratingScope:
        """`stoneware.tuning.context.tuning`: see there."""
        from stoneware.tuning.context import tuning

        return tuning(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
