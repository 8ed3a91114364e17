"""`convert` keeps the fp8 weights of layers that compressed-tensors loaded.

Needs the package compressed-tensors; docs/engines.md has the command.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed; docs/engines.md has the command")

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

from stoneware import nn, quantize


def compressed(preset, scales):
    """A model like compressed-tensors loads it, with its dense weight."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 384)).bfloat16().eval().requires_grad_(False)
    (layer,) = model
    weight = layer.weight.float()
    _, scale = quantize(weight, scales, power_of_two=True)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group": scheme}, ignore=[]))
    layer.weight_scale.copy_(scale)
    ModelCompressor.from_pretrained_model(model, quantization_format="float-quantized").compress_model(model)
    return model, weight


@pytest.mark.parametrize(
    ("preset", "scales", "recipe"), [("FP8_DYNAMIC", "row", "rowwise"), ("FP8_BLOCK", "block_2d", "blockwise")]
)
def test_convert_keeps_the_weights(preset, scales, recipe):
    model, dense = compressed(preset, scales)
    (layer,) = model
    weight, x = layer.weight, torch.randn(5, 256).bfloat16()
    done = nn.convert(model, "rowwise")
    assert done.swapped == {"0": f"Float8InferenceLinear, {recipe}"} and layer.weight is weight
    assert {*model.state_dict()} == {"0.weight", "0.bias", "0.weight_scale_inv"}
    expected = x.double() @ dense.double().t() + layer.bias.double()
    assert (model(x).double() - expected).norm() < 2**-4 * expected.norm()
    done.undo()
    assert type(layer) is torch.nn.Linear and {*model.state_dict()} == {"0.weight", "0.bias", "0.weight_scale"}
    assert "forward" in vars(layer)


def test_static_scales_of_x_are_kept():
    model, _ = compressed("FP8", "tensor")
    assert nn.convert(model, "rowwise").kept
