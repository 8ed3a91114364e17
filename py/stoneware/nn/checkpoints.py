"""What a converted model of transformers does when it is saved.

Transformers calls fp8 weights with blockwise scales "fp8". The model's config gets a `quantization_config`, so that
`from_pretrained` loads what `save_pretrained` wrote, here and where Stoneware is not installed. Transformers has no
format for the other recipes: `save_pretrained` refuses, since the checkpoint would load without an error and without
the scales.
"""

from __future__ import annotations

from typing import Any

import torch

from stoneware.nn.changes import Change
from stoneware.nn.inference import Float8InferenceLinear

_CONFIG = "quantization_config"


class Saving(Change):
    """How a model with frozen fp8 weights is saved."""

    def __init__(self, model: torch.nn.Module, recipe: str) -> None:
        super().__init__("", model, "")
        self.recipe = recipe
        self.had_config = hasattr(getattr(model, "config", None), _CONFIG)

    def change(self) -> None:
        if not hasattr(self.module, "save_pretrained"):
            return
        if self.recipe != "blockwise":
            vars(self.module)["save_pretrained"] = refuse_to_save
        elif not self.had_config and hasattr(self.module, "config"):
            setattr(self.module.config, _CONFIG, quantization_config(self.module))

    def revert(self) -> None:
        if vars(self.module).get("save_pretrained") is refuse_to_save:
            del vars(self.module)["save_pretrained"]
        config = getattr(self.module, "config", None)
        if not self.had_config and config is not None:
            vars(config).pop(_CONFIG, None)


def quantization_config(model: torch.nn.Module) -> dict[str, Any]:
    """The quantization_config of transformers for the blockwise layers of a model."""
    kept = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, torch.nn.Linear) and not isinstance(module, Float8InferenceLinear))
        or name.endswith("experts")
    ]
    return {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": kept,
    }  # fmt: skip


def refuse_to_save(*arguments: Any, **named: Any) -> None:
    """save_pretrained of a model whose scales no format of transformers has."""
    raise ValueError(
        "save_pretrained can write frozen fp8 weights of recipe 'blockwise' alone, and this model has others, whose "
        "scales from_pretrained would drop; save the model before it is converted and convert it after it is loaded, "
        "convert it with recipe='blockwise', or save model.state_dict() and load it into a model that was converted "
        "the same way"
    )
