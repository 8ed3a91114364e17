"""Launches one kernel with a fault for each tool of compute-sanitizer, which a tool that works
reports.

    compute-sanitizer --tool memcheck python -m tools.gpu_check.broken_kernel

A tool that reports nothing here, because it does not know the GPU or the driver, reports nothing of
other kernels either, and its silence about them says nothing. The kernel is PTX, which the driver
compiles, so that no compiler and no torch is needed; it asks for libcuda alone.
"""

from __future__ import annotations

import ctypes

NUM_THREADS = 64  # two warps: racecheck speaks of hazards between them as errors

PTX = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry broken(.param .u64 memory)
{
  .shared .align 4 .b8 slots[256];
  .reg .b32 %own, %mine, %others, %value, %sum;
  .reg .b64 %at, %offset;
  mov.u32 %value, %tid.x;
  shl.b32 %own, %value, 2;
  mov.u32 %sum, slots;
  add.u32 %mine, %sum, %own;
  add.u32 %others, %sum, 252;
  sub.u32 %others, %others, %own;
  // racecheck: a slot that the other warp writes, without a barrier between.
  st.shared.u32 [%mine], %value;
  ld.shared.u32 %sum, [%others];
  // initcheck: memory that nothing has written.
  ld.param.u64 %at, [memory];
  cvta.to.global.u64 %at, %at;
  cvt.u64.u32 %offset, %own;
  add.u64 %at, %at, %offset;
  ld.global.u32 %value, [%at];
  add.u32 %sum, %sum, %value;
  // memcheck: 256 bytes past the end of the 256 that are there.
  ld.global.u32 %value, [%at+512];
  add.u32 %sum, %sum, %value;
  st.global.u32 [%at], %sum;
  ret;
}
"""


class Driver:
    """libcuda, each call of which must succeed."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} must succeed, and it returned CUresult {code}; check nvidia-smi")

    def synchronize(self) -> int:
        """The CUresult: memcheck ends a kernel at its fault, and this program did not
        fail."""
        return self._library.cuCtxSynchronize()


def main() -> None:
    driver = Driver()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    memory = ctypes.c_uint64()
    driver.call("cuInit", 0)
    driver.call("cuDeviceGet", ctypes.byref(device), 0)
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver.call("cuCtxSetCurrent", context)
    driver.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4 * NUM_THREADS))
    driver.call("cuModuleLoadData", ctypes.byref(module), PTX.encode("ascii"))
    driver.call("cuModuleGetFunction", ctypes.byref(kernel), module, b"broken")
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
    driver.call("cuLaunchKernel", kernel, 1, 1, 1, NUM_THREADS, 1, 1, 0, None, arguments, None)
    print(f"the kernel with a fault of each kind ran: CUresult {driver.synchronize()}")


if __name__ == "__main__":
    main()
