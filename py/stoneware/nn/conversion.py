"""What `convert` did to a model, and how it is taken back."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from stoneware.nn.changes import Change
from stoneware.nn.experts import Experts

_LOG = logging.getLogger("stoneware.nn")


@dataclass(kw_only=True)
class Conversion:
    """The result of `convert`.

    Attributes:
      swapped: name of each linear layer that changed -> its new class and recipe.
      kept: name of each linear layer or module of experts that did not change -> the reason.
      blocks: name of each norm, feed-forward or module of experts that was replaced as a whole -> the layer it became.
      kept_blocks: name of each norm or feed-forward without a proof -> the reason.
    """

    model: torch.nn.Module
    swapped: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)
    kept_blocks: dict[str, str] = field(default_factory=dict)
    _changes: list[Change] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Restores each module, with its attributes, buffers and hooks.

        Parameters are the same objects, except for frozen weights: they are dequantized to their old dtype and keep
        the rounding. A module that was replaced or changed since stays, with a warning; so does an fp8 layer of
        another library whose old class has no scales for the weights that were loaded since.
        """
        left, loaded = [], []
        for change in reversed(self._changes):
            if not self._is_there(change):
                left += [change.name] if change.label else []
            elif change.has_form():
                change.undo()
            else:
                loaded.append(change.name)
        for record in (self._changes, self.blocks, self.swapped, self.kept_blocks):
            record.clear()
        if left:
            _LOG.warning(
                "undo left %s as it is: what convert put there was replaced or removed since; put the old module back "
                "by hand if you need it",
                _printable(", ".join(reversed(left))),
            )
        if loaded:
            _LOG.warning(
                "undo left %s as it is: its weights were loaded since, and the old class has other scales; load the "
                "checkpoint into a new model if you need it",
                _printable(", ".join(reversed(loaded))),
            )

    def _is_there(self, change: Change) -> bool:
        try:
            module = self.model.get_submodule(change.name)
        except AttributeError:  # it or its parent was removed
            return False
        return module is change.module and (type(module) is change.result or not change.label)

    def __str__(self) -> str:
        num_experts = sum(Experts.__name__ in label for label in self.blocks.values())
        num_all = len(self.swapped) + len(self.kept) + num_experts
        layers = "linear layers and experts" if num_experts else "linear layers"
        lines = [f"swapped {len(self.swapped) + num_experts} of {num_all} {layers}"]
        records = (
            ("", self.swapped), ("kept ", self.kept), ("whole ", self.blocks), ("not fused ", self.kept_blocks)
        )  # fmt: skip
        for prefix, names in records:
            names_by_text: dict[str, list[str]] = {}
            for name, text in names.items():
                names_by_text.setdefault(text, []).append(name)
            for text, members in names_by_text.items():
                examples = ", ".join(members[:3]) + (f" and {len(members) - 3} more" if len(members) > 3 else "")
                lines.append(f"  {prefix}{examples}: {text}")
        return "\n".join(map(_printable, lines))


def _printable(text: str) -> str:
    """Text with escapes instead of control characters, which names of modules may contain."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
