"""Saves converted models of transformers.

Transformers calls fp8 weights with blockwise scales "fp8". `save_pretrained` writes a `quantization_config` for them,
so that `from_pretrained` loads the checkpoint, here and where Stoneware is not installed. Transformers has no format
for the other recipes. `save_pretrained` raises an error there, because the checkpoint would load without its scales
and without an error.
"""

from __future__ import annotations

from typing import Any

import torch

from stoneware.nn.changes import Change
from stoneware.nn.experts import Float8InferenceExperts
from stoneware.nn.fused_blocks import FusedPublishedExperts
from stoneware.nn.inference import Float8InferenceLinear
from stoneware.nn.recipes import BLOCK

_CONFIG = "quantization_config"
_SAVE = "save_pretrained"
_FROZEN = (Float8InferenceLinear, Float8InferenceExperts, FusedPublishedExperts)


class Saving(Change):
    """save_pretrained of a model with frozen fp8 weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__("", model, "")

    def change(self) -> None:
        if hasattr(type(self.module), _SAVE):
            vars(self.module)[_SAVE] = _SavePretrained(self.module)

    def revert(self) -> None:
        if isinstance(vars(self.module).get(_SAVE), _SavePretrained):
            del vars(self.module)[_SAVE]


class _SavePretrained:
    """save_pretrained of a model: that of its class, with a quantization_config of its layers at the call."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Raises ValueError if transformers has no format for the scales, or for several formats in one checkpoint."""
        for name, module in self.model.named_modules():
            if not isinstance(module, _FROZEN) and any(
                parameter.element_size() == 1 for parameter in module.parameters(recurse=False)
            ):
                raise ValueError(
                    f"save_pretrained can write converted fp8 weights and 16-bit weights, but {name} was not converted "
                    "and has 8-bit weights of another format, whose scales from_pretrained would drop; undo the "
                    "conversion before the model is saved"
                )
            if isinstance(module, _FROZEN) and module.recipe != "blockwise":
                raise ValueError(
                    f"save_pretrained can write frozen fp8 weights of recipe 'blockwise' only, but {name} has recipe "
                    f"{module.recipe!r}, whose scales from_pretrained would drop; save the model before it is "
                    "converted and convert it after it is loaded, convert it with recipe='blockwise', or save "
                    "model.state_dict() and load it into a model that was converted the same way"
                )
        config = vars(self.model.config)
        before = config.get(_CONFIG)
        config[_CONFIG] = quantization_config(self.model)
        try:
            return type(self.model).save_pretrained(self.model, *arguments, **keywords)
        finally:
            if before is None:
                del config[_CONFIG]
            else:
                config[_CONFIG] = before


def quantization_config(model: torch.nn.Module) -> dict[str, Any]:
    """The quantization_config of transformers for the blockwise layers of a model."""
    unconverted = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, torch.nn.Linear) and not isinstance(module, Float8InferenceLinear))
        or (name.endswith("experts") and not isinstance(module, FusedPublishedExperts))
    ]
    return {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": unconverted,
    }  # fmt: skip
