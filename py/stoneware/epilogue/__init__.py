"""Epilogues: Python functions on torch tensors that run inside a matmul's kernel, linked and not compiled.

    sw.matmul(a, b, epilogue=lambda acc, r: torch.nn.functional.silu(acc) + r, inputs=(r,))

    identity.py      tells one function from another
    trace.py         runs the function once, on tensors without memory, and notes what it computes
    expression.py    what it noted: a value for each element of the outputs
    arithmetic.py    how each operator of torch is written in CUDA C++
    source.py        the expression as the device function of cc/gemm/epilogue_sm90.h, and its parameters
    device_code.h    what every such function begins with, and behind it
    fragments.h      loads and stores of 16 bytes
    philox.h         random bits of dropout; philox.py computes the same with torch
    dropout_kernel.h dropout outside of an epilogue (`stoneware.ops.dropout_kernel`)
    link.py          links the text into a kernel; also for the build, without torch
    shipped.py       common epilogues that the build linked
    linked.py        a kernel with the function linked in: from the wheel or the disk, at once, or in the background

`stoneware.ops.fused` makes calls of them.
"""
