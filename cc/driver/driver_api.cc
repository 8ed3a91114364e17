#include "cc/driver/driver_api.h"

#include <dlfcn.h>

#include <string>

namespace stoneware::driver {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

std::string VersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

[[noreturn]] void ThrowTooOld(const char* call, int version) {
  throw DriverError(call, 0, "DRIVER_TOO_OLD",
                    "the NVIDIA driver must support CUDA " + VersionText(kMinimumDriverVersion) +
                        " or newer, this one supports " +
                        (version > 0 ? VersionText(version) : std::string("less than 12.0")) +
                        "; update the NVIDIA driver");
}

void* OpenLibrary() {
  // RTLD_LOCAL: the driver's symbols are ours to look up, not the process's to bind to.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw DriverError("dlopen", 0, "DRIVER_NOT_FOUND",
                      std::string("running on a GPU needs the NVIDIA driver's ") + kLibrary +
                          ", which cannot be opened (" + dlerror() +
                          "); install the NVIDIA driver (in a container, pass the GPU through), or "
                          "use the reference backend");
  }
  return library;
}

DriverApi Resolve() {
  // Opened once and kept, so that a retry after a later failure does not pile up references.
  static void* library = nullptr;
  if (library == nullptr) library = OpenLibrary();

  DriverApi api;
  api.version = 0;
  const auto get_version =
      reinterpret_cast<decltype(&::cuDriverGetVersion)>(dlsym(library, "cuDriverGetVersion"));
  if (get_version != nullptr) Check("cuDriverGetVersion", get_version(&api.version));

  // cuda.h declares cuGetProcAddress_v2 under its unversioned name.
  const auto get_proc_address =
      reinterpret_cast<decltype(&::cuGetProcAddress)>(dlsym(library, "cuGetProcAddress_v2"));
  // cuGetProcAddress_v2 came with CUDA 12.0: without it the driver is older than that.
  if (get_proc_address == nullptr) ThrowTooOld("dlsym", api.version);
  if (api.version < kMinimumDriverVersion) ThrowTooOld("cuDriverGetVersion", api.version);

  const auto find = [&](const char* name, int since) {
    void* address = nullptr;
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    const CUresult result =
        get_proc_address(name, &address, since, CU_GET_PROC_ADDRESS_DEFAULT, &status);
    // The driver returns CUDA_ERROR_NOT_FOUND for an unknown name; that is a missing symbol too.
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_FOUND) {
      ThrowDriverError("cuGetProcAddress_v2", result, std::string("looking up ") + name);
    }
    if (address == nullptr || status != CU_GET_PROC_ADDRESS_SUCCESS) {
      throw DriverError("cuGetProcAddress_v2", 0, "DRIVER_SYMBOL_MISSING",
                        std::string("the NVIDIA driver must provide ") + name +
                            ", but this one (for CUDA " + VersionText(api.version) +
                            ") does not; reinstall the NVIDIA driver, or remove whatever stands "
                            "before its " +
                            kLibrary + " on LD_LIBRARY_PATH");
    }
    return address;
  };
#define STONEWARE_FIND_ENTRY(name, since) \
  api.name = reinterpret_cast<decltype(&::name)>(find(#name, since));
  STONEWARE_DRIVER_ENTRY_POINTS(STONEWARE_FIND_ENTRY)
#undef STONEWARE_FIND_ENTRY
  return api;
}

}  // namespace

std::atomic<const DriverApi*> DriverApi::loaded_{nullptr};

const DriverApi& DriverApi::Load() {
  static const DriverApi api = Resolve();
  loaded_.store(&api, std::memory_order_release);
  return api;
}

const DriverApi& DriverApi::Initialise() {
  const DriverApi& api = Load();
  Check("cuInit", api.cuInit(0));
  return api;
}

}  // namespace stoneware::driver
