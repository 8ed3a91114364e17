// stoneware.runtime._driver: launching any cubin, and what the driver says of its devices.
//
// Importing it makes no CUDA call. Every failure is a stoneware.errors.DriverError; a wrong
// argument is a TypeError or ValueError.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/driver/cubin_module.h"
#include "cc/driver/launch.h"
#include "cc/driver/python_binding.h"

using namespace nanobind::literals;

namespace stoneware::driver {
namespace {

// More than any kernel here has; lets a launch pack its parameters on the stack.
constexpr std::size_t kMaxParameters = 64;

// Bytes of a parameter of kind 'P' (pointer), 'q' (int64), 'i' (int32) or 'f' (fp32).
std::size_t ParameterBytes(char kind) {
  switch (kind) {
    case 'P':
    case 'q':
      return 8;
    case 'i':
    case 'f':
      return 4;
    default:
      throw std::invalid_argument(std::string("parameters must consist of the letters P (pointer), "
                                              "i (int32), q (int64), f (float32), but has '") +
                                  kind + "'; write one letter per kernel parameter");
  }
}

template <class Value>
Value CastArgument(nb::handle argument, std::size_t index, char kind, const char* expected) {
  Value value;
  if (!nb::try_cast<Value>(argument, value, /*convert=*/false)) {
    const std::string message =
        "argument " + std::to_string(index) + " must be " + expected + " (parameter kind '" + kind +
        "'), but is " + nb::repr(argument).c_str() + "; pass the kernel's parameters in order";
    // A number of the right type but out of range is a wrong value.
    if (PyLong_Check(argument.ptr()) && kind != 'f') throw nb::value_error(message.c_str());
    throw nb::type_error(message.c_str());
  }
  return value;
}

class Kernel {
 public:
  Kernel(const nb::bytes& cubin, std::string symbol, std::string parameters, unsigned block_threads,
         unsigned shared_bytes)
      : cubin_(static_cast<const char*>(cubin.data()),
               static_cast<const char*>(cubin.data()) + cubin.size()),
        parameters_(std::move(parameters)),
        shape_{{}, {}, {block_threads, 1, 1}, shared_bytes},
        kernel_(MakeSpec(std::move(symbol))) {}

  void Launch(int device, std::uint64_t stream, unsigned grid_x, unsigned grid_y, unsigned grid_z,
              const nb::args& arguments) {
    CheckNumber(arguments.size());
    std::array<std::uint64_t, kMaxParameters> slots;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      slots[i] = Slot(arguments[i], i, parameters_[i]);
    }
    const LaunchShape shape = ShapeOf({grid_x, grid_y, grid_z});

    // The driver may wait for room in the stream's queue, and a callback that frees some may need
    // the interpreter.
    const nb::gil_scoped_release release;
    const DriverApi& api = DriverApi::Get();
    const ContextGuard context(api, device);
    Queue(api, context, shape, slots.data(), reinterpret_cast<CUstream>(stream));
  }

  // Queues the kernel in the current context, with the GIL released; a slot for each parameter.
  void Queue(const DriverApi& api, const ContextGuard& context, const LaunchShape& shape,
             std::uint64_t* slots, CUstream stream) {
    std::array<void*, kMaxParameters> pointers;
    for (std::size_t i = 0; i < parameters_.size(); ++i) pointers[i] = &slots[i];
    driver::Launch(api, kernel_.FunctionOn(api, context), shape, stream, pointers.data());
  }

  const std::string& parameters() const { return parameters_; }

  void CheckNumber(std::size_t num_arguments) const {
    if (num_arguments == parameters_.size()) return;
    throw nb::type_error(("kernel " + kernel_.spec().name + " takes " +
                          std::to_string(parameters_.size()) + " arguments (\"" + parameters_ +
                          "\"), but got " + std::to_string(num_arguments) +
                          "; pass one for each parameter")
                             .c_str());
  }

  // The shape of a launch on this grid.
  LaunchShape ShapeOf(Extent grid) const {
    const auto check = [](const char* name, unsigned blocks) {
      if (blocks >= 1) return;
      throw std::invalid_argument(std::string(name) +
                                  " must be positive, but is 0; launch no kernel on an empty grid");
    };
    check("grid_x", grid.x);
    check("grid_y", grid.y);
    check("grid_z", grid.z);
    LaunchShape shape = shape_;
    shape.grid = grid;
    return shape;
  }

  // An argument as a launch packs it. Little-endian: the first bytes of a slot are the value,
  // whatever its size.
  static std::uint64_t Slot(nb::handle argument, std::size_t index, char kind) {
    const auto bits = [](auto value) {
      std::uint64_t slot = 0;
      static_assert(sizeof(value) <= sizeof(slot));
      std::memcpy(&slot, &value, sizeof(value));
      return slot;
    };
    switch (kind) {
      case 'P':
        return CastArgument<std::uint64_t>(argument, index, kind, "an address, 0 to 2**64 - 1");
      case 'q':
        return bits(CastArgument<std::int64_t>(argument, index, kind, "an int of 64 bits"));
      case 'i':
        return bits(CastArgument<std::int32_t>(argument, index, kind, "an int of 32 bits"));
      default: {
        if (!PyLong_Check(argument.ptr())) {
          return bits(static_cast<float>(CastArgument<double>(argument, index, kind, "a float")));
        }
        const double value = PyLong_AsDouble(argument.ptr());
        if (value == -1.0 && PyErr_Occurred()) throw nb::python_error();  // beyond a double
        return bits(static_cast<float>(value));
      }
    }
  }

 private:
  CubinSpec MakeSpec(std::string symbol) const {
    if (parameters_.size() > kMaxParameters) {
      throw std::invalid_argument("a kernel must have at most " + std::to_string(kMaxParameters) +
                                  " parameters, but parameters lists " +
                                  std::to_string(parameters_.size()) +
                                  "; pass a structure by pointer instead");
    }
    CubinSpec spec;
    spec.name = std::move(symbol);
    spec.image = {cubin_.data(), cubin_.size()};
    for (const char kind : parameters_) spec.parameter_bytes.push_back(ParameterBytes(kind));
    spec.shared_bytes = shape_.shared_bytes;
    return spec;
  }

  const std::vector<char> cubin_;
  const std::string parameters_;
  const LaunchShape shape_;  // all but the grid
  CubinKernel kernel_;
};

// Launches of kernels one after another, with all arguments but the tensors' addresses fixed.
class Plan {
 public:
  // A launch: kernel, grid, and for each parameter a number, or a pair of "address" or "presence"
  // and the position of a tensor.
  using Step = std::tuple<nb::object, std::tuple<unsigned, unsigned, unsigned>, nb::list>;

  Plan(int device, std::uint32_t num_tensors, const std::vector<Step>& steps)
      : device_(device), num_tensors_(num_tensors) {
    for (const auto& [kernel, grid, arguments] : steps) {
      Made& made = steps_.emplace_back();
      made.owner = kernel;
      made.kernel = nb::cast<Kernel*>(kernel);
      made.kernel->CheckNumber(arguments.size());
      made.shape = made.kernel->ShapeOf({std::get<0>(grid), std::get<1>(grid), std::get<2>(grid)});
      for (std::size_t i = 0; i < arguments.size(); ++i) AddArgument(arguments[i], i, &made);
    }
  }

  void Launch(void* const* tensors, CUstream stream) const {
    const DriverApi& api = DriverApi::Get();
    const ContextGuard context(api, device_);
    for (const Made& step : steps_) {
      std::array<std::uint64_t, kMaxParameters> slots = step.slots;
      for (const auto& [parameter, tensor] : step.addresses) {
        slots[parameter] = reinterpret_cast<std::uintptr_t>(tensors[tensor]);
      }
      for (const auto& [parameter, tensor] : step.presences) {
        slots[parameter] = tensors[tensor] != nullptr ? 1 : 0;
      }
      step.kernel->Queue(api, context, step.shape, slots.data(), stream);
    }
  }

  std::uint32_t num_tensors() const { return num_tensors_; }
  std::size_t workspace_bytes() const { return 0; }

 private:
  using Positions = std::vector<std::pair<std::size_t, std::uint32_t>>;  // (parameter, tensor)

  struct Made {
    nb::object owner;  // of the kernel
    Kernel* kernel = nullptr;
    LaunchShape shape;
    std::array<std::uint64_t, kMaxParameters> slots{};
    Positions addresses;
    Positions presences;
  };

  void AddArgument(nb::handle argument, std::size_t index, Made* step) const {
    const char kind = step->kernel->parameters()[index];
    std::pair<std::string, std::uint32_t> of;
    if (!nb::isinstance<nb::tuple>(argument)) {
      step->slots[index] = Kernel::Slot(argument, index, kind);
    } else if (!nb::try_cast(argument, of) || of.second >= num_tensors_ ||
               of.first != (kind == 'P' ? "address" : "presence") || kind == 'f') {
      throw std::invalid_argument(
          "argument " + std::to_string(index) + " must be a number, (\"address\", tensor) of a " +
          "pointer or (\"presence\", tensor) of an int, with a tensor below " +
          std::to_string(num_tensors_) + ", but is " + nb::repr(argument).c_str() + "; correct it");
    } else {
      (kind == 'P' ? step->addresses : step->presences).emplace_back(index, of.second);
    }
  }

  const int device_;
  const std::uint32_t num_tensors_;
  std::vector<Made> steps_;
};

std::tuple<int, int> DriverVersion() {
  const int version = DriverApi::Load().version;
  return {version / 1000, version % 1000 / 10};
}

int DeviceCount() {
  try {
    const DriverApi& api = DriverApi::Get();
    int count = 0;
    Check("cuDeviceGetCount", api.cuDeviceGetCount(&count));
    return count;
  } catch (const DriverError& error) {
    // cuInit's way of counting to zero.
    if (error.call() == "cuInit" && error.code() == CUDA_ERROR_NO_DEVICE) return 0;
    throw;
  }
}

nb::dict DeviceAttributes(int ordinal) {
  const DriverApi& api = DriverApi::Get();
  CUdevice device = -1;
  CheckWhile("cuDeviceGet", api.cuDeviceGet(&device, ordinal),
             [&] { return "looking for device " + std::to_string(ordinal); });
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    Check("cuDeviceGetAttribute", api.cuDeviceGetAttribute(&value, which, device));
    return value;
  };
  std::array<char, 256> name{};
  Check("cuDeviceGetName", api.cuDeviceGetName(name.data(), name.size(), device));
  std::size_t memory_bytes = 0;
  Check("cuDeviceTotalMem", api.cuDeviceTotalMem(&memory_bytes, device));

  nb::dict attributes;
  attributes["name"] = name.data();
  attributes["compute_capability"] =
      nb::make_tuple(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                     attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
  attributes["num_sms"] = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  attributes["l2_bytes"] = attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  attributes["memory_clock_khz"] = attribute(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
  attributes["memory_bus_bits"] = attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
  attributes["memory_bytes"] = memory_bytes;
  attributes["shared_bytes_optin"] =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  return attributes;
}

}  // namespace
}  // namespace stoneware::driver

NB_MODULE(_driver, m) {
  using namespace stoneware::driver;
  // Torch keeps what was registered with it until the process ends, and plans with that.
  nb::set_leak_warnings(false);
  m.doc() = "Launches cubins and asks for devices through the NVIDIA driver, found at first use.";
  RegisterPythonErrors();

  nb::class_<Kernel>(m, "Kernel",
                     "A kernel in a cubin. Constructing it makes no CUDA call; it is loaded by its "
                     "first launch, once per process and context.")
      .def(nb::init<const nb::bytes&, std::string, std::string, unsigned, unsigned>(), "cubin"_a,
           "symbol"_a, "parameters"_a, "block_threads"_a, "shared_bytes"_a,
           "Args:\n"
           "  cubin: its bytes, or those of a fat binary that has it.\n"
           "  symbol: the kernel's name in it.\n"
           "  parameters: a letter per kernel parameter: P pointer, i int32, q int64, f float32.\n"
           "  block_threads: threads of a block.\n"
           "  shared_bytes: dynamic shared memory of a block.\n\n"
           "Raises:\n"
           "  ValueError: the bytes are neither a cubin nor a fat binary, or an argument is out of "
           "range.")
      .def("launch", &Kernel::Launch, "device"_a, "stream"_a, "grid_x"_a, "grid_y"_a, "grid_z"_a,
           "args"_a,
           "Queues the kernel on a stream of a device.\n\n"
           "Args:\n"
           "  device: ordinal of the device.\n"
           "  stream: the CUstream as an int; 0 is the default stream.\n"
           "  grid_x, grid_y, grid_z: blocks of the grid.\n"
           "  args: one per kernel parameter; pointers as ints.\n\n"
           "Raises:\n"
           "  DriverError: the driver refused, or the cubin does not fit the device.\n"
           "  TypeError, ValueError: an argument is missing, of the wrong type or out of range.");

  nb::class_<Plan> plan(m, "Plan",
                        "Launches of kernels one after another, with all but the tensors fixed.");
  plan.def(
      nb::init<int, std::uint32_t, const std::vector<Plan::Step>&>(), "device"_a, "num_tensors"_a,
      "steps"_a,
      "Checks the launches; makes no CUDA call.\n\n"
      "Args:\n"
      "  device: ordinal of the device.\n"
      "  num_tensors: how many tensors a call passes.\n"
      "  steps: (kernel, (grid_x, grid_y, grid_z), arguments) of each launch. An argument is\n"
      "    a number, (\"address\", i) for the address of tensor i, or (\"presence\", i) for 1\n"
      "    where there is a tensor i, else 0.\n\n"
      "Raises:\n"
      "  TypeError, ValueError: an argument is missing, of the wrong type or out of range.");
  BindLaunches(plan);

  m.def("driver_version", &DriverVersion, nb::call_guard<nb::gil_scoped_release>(),
        "The CUDA version that the driver supports, as (major, minor). Raises DriverError.");
  m.def("device_count", &DeviceCount, nb::call_guard<nb::gil_scoped_release>(),
        "The number of GPUs; 0 with a driver but no GPU. Raises DriverError.");
  m.def("device_attributes", &DeviceAttributes, "device"_a,
        "What the driver says of a device: name, compute_capability (major, minor), num_sms,\n"
        "l2_bytes, memory_clock_khz, memory_bus_bits, memory_bytes, shared_bytes_optin.\n"
        "Raises DriverError.");
}
