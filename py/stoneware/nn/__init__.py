"""Layers on Stoneware's matmuls, and `convert`, which swaps those of a model.

    sw.nn.convert(model, recipe="rowwise")     # in place; print() says what was swapped
    sw.nn.Linear, Float8Linear, Float8InferenceLinear

docs/layers.md says which recipe does what.
"""

from stoneware.nn.conversion import Conversion
from stoneware.nn.convert import convert
from stoneware.nn.experts import Experts, Float8InferenceExperts
from stoneware.nn.fsdp import gather_in_fp8
from stoneware.nn.inference import Float8InferenceLinear
from stoneware.nn.linear import Float8Linear, Linear
from stoneware.nn.lora import Lora
from stoneware.nn.swiglu import SwiGLU

__all__ = [
    "Conversion",
    "Experts",
    "Float8InferenceExperts",
    "Float8InferenceLinear",
    "Float8Linear",
    "Linear",
    "Lora",
    "SwiGLU",
    "convert",
    "gather_in_fp8",
]
