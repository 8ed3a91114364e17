"""Stoneware's kernels inside other libraries, each through that library's own hooks.

    stoneware.integrations.transformers     # a quantizer, and the kernel module of FP8Linear and FP8Experts
    stoneware.integrations.vllm             # linears and experts; found by the entry point vllm.general_plugins
    stoneware.integrations.sglang           # block-scaled linears, experts; found by the entry point sglang.srt.plugins
    stoneware.integrations.torchao          # the linear of Float8Tensor

Nothing here is imported by `import stoneware`, and importing this package imports none of those libraries.
"""
