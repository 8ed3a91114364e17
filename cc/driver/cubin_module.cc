#include "cc/driver/cubin_module.h"

#include <elf.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace stoneware::driver {
namespace {

// Dynamic shared memory that every GPU grants without asking; more must be allowed by an attribute
// (CUDA C++ Programming Guide, "Shared Memory" under each compute capability).
constexpr unsigned kSharedBytesWithoutOptIn = 48 * 1024;

Elf64_Ehdr ElfHeader(std::string_view cubin) {
  const auto refuse = [&](const std::string& found) {
    throw std::invalid_argument(
        "a kernel must be a fat binary, or a cubin, which is a whole 64-bit ELF file for CUDA, "
        "but " +
        found + "; rebuild the kernel or reinstall the package");
  };
  Elf64_Ehdr header;
  if (cubin.size() < sizeof(header)) {
    refuse("these are " + std::to_string(cubin.size()) + " bytes, less than an ELF header");
  }
  std::memcpy(&header, cubin.data(), sizeof(header));
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64) {
    refuse("these " + std::to_string(cubin.size()) + " bytes do not begin like one");
  }
  if (header.e_machine != EM_CUDA) {
    refuse("its machine is " + std::to_string(header.e_machine) + ", not " +
           std::to_string(EM_CUDA));
  }
  // The driver is given no length: it reads as far as the headers say, so they must stay inside.
  const auto ends_inside = [&](std::uint64_t offset, std::uint64_t count, std::uint64_t bytes) {
    return offset <= cubin.size() && count * bytes <= cubin.size() - offset;
  };
  if (!ends_inside(header.e_shoff, header.e_shnum, header.e_shentsize) ||
      !ends_inside(header.e_phoff, header.e_phnum, header.e_phentsize)) {
    refuse("its header tables end beyond the " + std::to_string(cubin.size()) +
           " bytes at hand: it is cut short");
  }
  return header;
}

// How a fat binary begins, as CUDA's fatbinary writes it.
struct FatbinHeader {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t header_bytes;
  std::uint64_t content_bytes;
};
constexpr std::uint32_t kFatbinMagic = 0xBA55ED50;

bool IsFatbin(std::string_view image) {
  return image.size() >= sizeof(kFatbinMagic) &&
         std::memcmp(image.data(), &kFatbinMagic, sizeof(kFatbinMagic)) == 0;
}

// Throws unless the bytes are all that the driver will read.
void CheckImage(std::string_view image) {
  if (!IsFatbin(image)) {
    ElfHeader(image);
    return;
  }
  FatbinHeader header{};
  if (image.size() >= sizeof(header)) std::memcpy(&header, image.data(), sizeof(header));
  if (header.header_bytes < sizeof(header) || image.size() < header.header_bytes ||
      header.content_bytes > image.size() - header.header_bytes) {
    throw std::invalid_argument("a fat binary must be whole, but its " +
                                std::to_string(image.size()) +
                                " bytes end before its content; rebuild the kernel or reinstall "
                                "the package");
  }
}

// " (a cubin for sm_90)"; nothing of a fat binary, whose cubin only the driver reads.
std::string ArchText(std::string_view image) {
  if (IsFatbin(image)) return "";
  const Elf64_Ehdr header = ElfHeader(image);
  // Toolkits before 13.0 write ELF ABI version 7 with the architecture in the low byte of the
  // flags; from 13.0 on it is version 8 and the second byte (llvm/BinaryFormat/ELF.h, EF_CUDA_SM).
  const bool in_low_byte = header.e_ident[EI_ABIVERSION] < 8;
  return " (a cubin for sm_" +
         std::to_string(in_low_byte ? header.e_flags & 0xff : header.e_flags >> 8 & 0xff) + ")";
}

std::string DeviceText(const DriverApi& api, int device) {
  int major = 0;
  int minor = 0;
  // Only for the text of another error: if a query fails as well, the message omits this part.
  if (api.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) !=
          CUDA_SUCCESS ||
      api.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device) !=
          CUDA_SUCCESS) {
    return "device " + std::to_string(device);
  }
  return "device " + std::to_string(device) + " (compute capability " + std::to_string(major) +
         "." + std::to_string(minor) + ", driver for CUDA " + std::to_string(api.version / 1000) +
         "." + std::to_string(api.version % 1000 / 10) + ")";
}

}  // namespace

CubinKernel::CubinKernel(CubinSpec spec) : spec_(std::move(spec)) { CheckImage(spec_.image); }

void CubinKernel::Prepare(const DriverApi& api, const ContextGuard& context) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::uint64_t ready = ready_devices_.load(std::memory_order_relaxed);
  if ((ready & Bit(context.device())) != 0) return;  // another thread was faster

  const auto loading = [&] {
    return "loading kernel " + spec_.name + ArchText(spec_.image) + " on " +
           DeviceText(api, context.device());
  };
  if (library_ == nullptr) {
    CheckWhile("cuLibraryLoadData",
               api.cuLibraryLoadData(&library_, spec_.image.data(), nullptr, nullptr, 0, nullptr,
                                     nullptr, 0),
               loading);
  }
  if (kernel_ == nullptr) {
    CUkernel kernel = nullptr;
    CheckWhile("cuLibraryGetKernel", api.cuLibraryGetKernel(&kernel, library_, spec_.name.c_str()),
               loading);
    CheckParameters(api, kernel);
    kernel_ = kernel;
  }
  if (spec_.shared_bytes > kSharedBytesWithoutOptIn) {
    CheckWhile(
        "cuKernelSetAttribute",
        api.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                 static_cast<int>(spec_.shared_bytes), kernel_, context.device()),
        [&] {
          return "allowing " + std::to_string(spec_.shared_bytes) + " bytes of shared memory, " +
                 loading();
        });
  }
  // The driver would load the kernel at its first launch, where an error says less.
  CUfunction function = nullptr;
  CheckWhile("cuKernelGetFunction", api.cuKernelGetFunction(&function, kernel_), loading);
  ready_devices_.store(ready | Bit(context.device()), std::memory_order_release);
}

// A kernel reads its parameters at the offsets that its own compiler chose. Where host and device
// disagree (different compilers, a cubin of another build) it would read garbage, so refuse.
void CubinKernel::CheckParameters(const DriverApi& api, CUkernel kernel) const {
  const auto mismatch = [&](const std::string& difference) {
    return DriverError("cuKernelGetParamInfo", 0, "KERNEL_PARAMETERS_DIFFER",
                       "host and cubin must agree on the parameters of kernel " + spec_.name +
                           ", but " + difference +
                           "; host and cubin are of different builds: reinstall the package");
  };
  const std::size_t num_parameters = spec_.parameter_bytes.size();
  for (std::size_t i = 0; i < num_parameters; ++i) {
    std::size_t offset = 0;
    std::size_t bytes = 0;
    const CUresult result = api.cuKernelGetParamInfo(kernel, i, &offset, &bytes);
    if (result == CUDA_ERROR_INVALID_VALUE) {
      throw mismatch("the host passes " + std::to_string(num_parameters) + " and the cubin takes " +
                     std::to_string(i));
    }
    Check("cuKernelGetParamInfo", result);
    if (bytes != spec_.parameter_bytes[i]) {
      throw mismatch("parameter " + std::to_string(i) + " has " +
                     std::to_string(spec_.parameter_bytes[i]) + " bytes on the host and " +
                     std::to_string(bytes) + " in the cubin");
    }
  }
  std::size_t offset = 0;
  std::size_t bytes = 0;
  const CUresult beyond = api.cuKernelGetParamInfo(kernel, num_parameters, &offset, &bytes);
  if (beyond == CUDA_SUCCESS) {
    throw mismatch("the host passes " + std::to_string(num_parameters) +
                   " and the cubin takes more");
  }
  if (beyond != CUDA_ERROR_INVALID_VALUE) ThrowDriverError("cuKernelGetParamInfo", beyond);
}

}  // namespace stoneware::driver
