"""Kernels run in Triton's interpreter, on the CPU."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _scalars_as_indices(monkeypatch):
    """Triton 3.6's interpreter calls int() on arrays of one element, which numpy 2.4 refuses.

    To be dropped with a Triton whose interpreter.py, _patch_lang_tensor, takes .item() first.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_with_item(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_item)
