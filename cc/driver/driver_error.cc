#include "cc/driver/driver_error.h"

#include <algorithm>
#include <iterator>

#include "cc/driver/driver_api.h"

namespace stoneware::driver {
namespace {

// What to do, where several results call for the same.
constexpr const char* kUpdateDriver =
    "the driver is older than this package's kernels need; update the NVIDIA driver";
constexpr const char* kReinstallDriver =
    "the driver's installation is incomplete; reinstall the NVIDIA driver, or mount all of its "
    "libraries into the container";
constexpr const char* kContextLost =
    "the context is not alive or not usable from this thread; do not reset the device while its "
    "tensors are in use";
constexpr const char* kContextDead =
    "a kernel of this process crashed and took the context with it, perhaps an earlier one; "
    "restart the process and find the kernel with compute-sanitizer";
constexpr const char* kHardware =
    "the GPU reports a hardware fault; see nvidia-smi -q and dmesg, and take the GPU out of use";
constexpr const char* kMps = "the MPS service refused or failed; check nvidia-cuda-mps-control";
constexpr const char* kCapture =
    "the call does not fit the CUDA graph capture in progress; run the same shapes once before "
    "the capture, and capture from one thread";
constexpr const char* kNoAdvice =
    "this package knows no remedy; look the name up in NVIDIA's documentation of CUresult, and "
    "report "
    "it as a bug with this message";

struct KnownResult {
  CUresult code;
  const char* name;
  const char* advice;
};

// The results that a call of this package may meet, in the order of cuda.h.
#define RESULT(code, advice) {code, #code, advice}
constexpr KnownResult kKnownResults[] = {
    RESULT(CUDA_ERROR_INVALID_VALUE,
           "an argument is outside what the driver allows; compare the values above with the "
           "GPU's limits and, if they fit, report them as a bug"),
    RESULT(CUDA_ERROR_OUT_OF_MEMORY,
           "the GPU or the host has no memory left; free tensors, or use a smaller batch"),
    RESULT(CUDA_ERROR_NOT_INITIALIZED,
           "the driver is not initialised; call from a process in which CUDA can start"),
    RESULT(CUDA_ERROR_DEINITIALIZED,
           "the driver is shutting down; do not launch from an atexit handler or a destructor that "
           "runs at exit"),
    RESULT(CUDA_ERROR_STUB_LIBRARY,
           "libcuda.so.1 is the toolkit's stub, not a driver; take the stubs folder off "
           "LD_LIBRARY_PATH"),
    RESULT(CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER, kUpdateDriver),
    RESULT(
        CUDA_ERROR_DEVICE_UNAVAILABLE,
        "another process holds the GPU in exclusive mode, or it is in prohibited mode; free it or "
        "set its compute mode to default (nvidia-smi -c 0)"),
    RESULT(
        CUDA_ERROR_NO_DEVICE,
        "the driver sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the reference "
        "backend"),
    RESULT(CUDA_ERROR_INVALID_DEVICE,
           "no GPU has this number in this process; pick one below the device count, and check "
           "CUDA_VISIBLE_DEVICES"),
    RESULT(CUDA_ERROR_DEVICE_NOT_LICENSED,
           "the virtual GPU has no licence; ask the administrator of the host for one"),
    RESULT(CUDA_ERROR_INVALID_IMAGE,
           "the driver cannot read the cubin: it is damaged, or made by a toolkit newer than the "
           "driver; reinstall the package, or update the NVIDIA driver"),
    RESULT(CUDA_ERROR_INVALID_CONTEXT, kContextLost),
    RESULT(CUDA_ERROR_CONTEXT_ALREADY_CURRENT, kContextLost),
    RESULT(
        CUDA_ERROR_NO_BINARY_FOR_GPU,
        "the cubin does not fit this GPU; use a package built for its architecture (build setting "
        "cuda_archs), or another backend"),
    RESULT(CUDA_ERROR_ECC_UNCORRECTABLE, kHardware),
    RESULT(CUDA_ERROR_CONTEXT_ALREADY_IN_USE, kContextLost),
    RESULT(CUDA_ERROR_INVALID_PTX, kUpdateDriver),
    RESULT(CUDA_ERROR_NVLINK_UNCORRECTABLE, kHardware),
    RESULT(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, kUpdateDriver),
    RESULT(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, kUpdateDriver),
    RESULT(CUDA_ERROR_JIT_COMPILATION_DISABLED, kUpdateDriver),
    RESULT(CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC, kUpdateDriver),
    RESULT(CUDA_ERROR_CONTAINED, kContextDead),
    RESULT(CUDA_ERROR_FILE_NOT_FOUND, kReinstallDriver),
    RESULT(CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND, kReinstallDriver),
    RESULT(CUDA_ERROR_SHARED_OBJECT_INIT_FAILED, kReinstallDriver),
    RESULT(
        CUDA_ERROR_OPERATING_SYSTEM,
        "a call to the operating system failed inside the driver; check dmesg, the limits of the "
        "process (ulimit -a) and the container's access to /dev/nvidia*"),
    RESULT(CUDA_ERROR_INVALID_HANDLE,
           "a stream, function or context is not alive in this context; pass a stream of the same "
           "device, and do not use it after its device was reset"),
    RESULT(CUDA_ERROR_NOT_FOUND,
           "the driver knows no such name; the cubin or the driver is not the one this package was "
           "built with: reinstall the package"),
    RESULT(CUDA_ERROR_NOT_READY, "work on the stream has not finished; synchronise it first"),
    RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, kContextDead),
    RESULT(
        CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
        "the launch asks for more registers, threads or shared memory than an SM of this GPU has; "
        "choose another kernel or backend"),
    RESULT(CUDA_ERROR_LAUNCH_TIMEOUT,
           "a kernel ran longer than the display's time limit; use a GPU without a display"),
    RESULT(CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING, kContextDead),
    RESULT(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, kContextLost),
    RESULT(CUDA_ERROR_CONTEXT_IS_DESTROYED, kContextLost),
    RESULT(CUDA_ERROR_ASSERT, kContextDead),
    RESULT(CUDA_ERROR_HARDWARE_STACK_ERROR, kContextDead),
    RESULT(CUDA_ERROR_ILLEGAL_INSTRUCTION, kContextDead),
    RESULT(CUDA_ERROR_MISALIGNED_ADDRESS, kContextDead),
    RESULT(CUDA_ERROR_INVALID_ADDRESS_SPACE, kContextDead),
    RESULT(CUDA_ERROR_INVALID_PC, kContextDead),
    RESULT(CUDA_ERROR_LAUNCH_FAILED, kContextDead),
    RESULT(
        CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
        "a cooperative launch has more blocks than the GPU holds at once; choose another kernel"),
    RESULT(CUDA_ERROR_TENSOR_MEMORY_LEAK, kContextDead),
    RESULT(
        CUDA_ERROR_NOT_PERMITTED,
        "the driver forbids the operation here; check the process's rights, and whether the stream "
        "is being captured"),
    RESULT(CUDA_ERROR_NOT_SUPPORTED,
           "this GPU or driver does not support the operation; choose another backend"),
    RESULT(CUDA_ERROR_SYSTEM_NOT_READY,
           "the NVLink fabric is not up; start nvidia-fabricmanager and try again"),
    RESULT(
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
        "libcuda and the kernel driver are of different versions; reboot, or make the container's "
        "libcuda match the host's driver"),
    RESULT(
        CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE,
        "the forward-compatibility libcuda does not support this GPU; take it off LD_LIBRARY_PATH "
        "or update the kernel driver"),
    RESULT(CUDA_ERROR_MPS_CONNECTION_FAILED, kMps),
    RESULT(CUDA_ERROR_MPS_RPC_FAILURE, kMps),
    RESULT(CUDA_ERROR_MPS_SERVER_NOT_READY, kMps),
    RESULT(CUDA_ERROR_MPS_MAX_CLIENTS_REACHED, kMps),
    RESULT(CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED, kMps),
    RESULT(CUDA_ERROR_MPS_CLIENT_TERMINATED, kMps),
    RESULT(CUDA_ERROR_CDP_NOT_SUPPORTED, kUpdateDriver),
    RESULT(CUDA_ERROR_CDP_VERSION_MISMATCH, kUpdateDriver),
    RESULT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, kCapture),
    RESULT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, kCapture),
    RESULT(CUDA_ERROR_STREAM_CAPTURE_MERGE, kCapture),
    RESULT(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, kCapture),
    RESULT(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, kCapture),
    RESULT(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, kCapture),
    RESULT(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, kCapture),
    RESULT(CUDA_ERROR_CAPTURED_EVENT, kCapture),
    RESULT(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, kCapture),
    RESULT(CUDA_ERROR_TIMEOUT,
           "the driver gave up waiting; check the GPU's state with nvidia-smi and try again"),
    RESULT(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, kCapture),
    RESULT(CUDA_ERROR_EXTERNAL_DEVICE,
           "a device outside CUDA failed; check dmesg and the health of the node"),
    RESULT(
        CUDA_ERROR_INVALID_CLUSTER_SIZE,
        "the GPU cannot schedule a cluster of this size; choose a kernel with a smaller cluster"),
    RESULT(CUDA_ERROR_KEY_ROTATION,
           "confidential computing must rotate its keys; finish running work and try again"),
    RESULT(CUDA_ERROR_UNKNOWN,
           "the driver gives no reason; check dmesg for Xid lines and restart the process"),
};
#undef RESULT

// The driver knows the names that the table lacks, once it is loaded.
std::string NameFromDriver(CUresult result) {
  const DriverApi* api = DriverApi::LoadedOrNull();
  const char* name = nullptr;
  if (api != nullptr && api->cuGetErrorName(result, &name) == CUDA_SUCCESS && name != nullptr) {
    return name;
  }
  return "CUDA_ERROR_WITHOUT_NAME";
}

}  // namespace

void ThrowDriverError(const char* call, CUresult result, std::string_view doing) {
  const auto* known = std::find_if(std::begin(kKnownResults), std::end(kKnownResults),
                                   [&](const KnownResult& entry) { return entry.code == result; });
  const bool is_known = known != std::end(kKnownResults);
  const std::string name = is_known ? known->name : NameFromDriver(result);
  const char* advice = is_known ? known->advice : kNoAdvice;
  std::string message = call;
  message += " must succeed but returned " + name + " (" + std::to_string(result) + ")";
  if (!doing.empty()) message.append(" while ").append(doing);
  message.append(": ").append(advice);
  throw DriverError(call, static_cast<int>(result), name, message);
}

}  // namespace stoneware::driver
