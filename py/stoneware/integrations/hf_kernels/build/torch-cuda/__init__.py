"""`kernels-community/finegrained-fp8`, for LOCAL_KERNELS: the functions of stoneware.integrations.finegrained_fp8."""

from stoneware.integrations.finegrained_fp8 import fp8_act_quant, matmul_2d, matmul_batched, matmul_grouped

__all__ = ["fp8_act_quant", "matmul_2d", "matmul_batched", "matmul_grouped"]
