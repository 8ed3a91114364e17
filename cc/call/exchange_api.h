// What a tensor of another library is, read without linking that library.
//
// Declares the part of DLPack's C exchange interface that is used here: a table of functions in a
// capsule on the tensor's type (DLPack 1.3, "C exchange API": `__dlpack_c_exchange_api__`, capsule
// "dlpack_exchange_api"; https://dmlc.github.io/dlpack/latest/c_api.html). torch.Tensor has it
// since torch 2.10. The layouts are those of major version 1, which later minor versions keep.

#pragma once

#include <Python.h>

#include <cstdint>

namespace stoneware::call {

inline constexpr char kExchangeAttribute[] = "__dlpack_c_exchange_api__";
inline constexpr char kExchangeCapsule[] = "dlpack_exchange_api";
inline constexpr std::uint32_t kExchangeMajorVersion = 1;

// DLDeviceType.
inline constexpr std::int32_t kCpu = 1;
inline constexpr std::int32_t kCuda = 2;

// DLDataTypeCode: kDLUInt, after kDLInt, which is 0.
inline constexpr std::uint8_t kUnsignedCode = 1;

// DLDataTypeCode: kDLFloat8_e3m4, the first of the codes of floats of 8 bits and less.
inline constexpr std::uint8_t kFirstFp8Code = 7;

// DLDevice.
struct TensorDevice {
  std::int32_t type;
  std::int32_t id;
};

// DLDataType.
struct TensorDtype {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;

  bool is_integer() const { return code <= kUnsignedCode; }
  bool is_fp8() const { return code >= kFirstFp8Code && bits == 8; }
};

// DLTensor. Shape and strides, in elements, belong to the tensor it was read from; nullptr if
// num_dims is 0.
struct TensorView {
  void* data;
  TensorDevice device;
  std::int32_t num_dims;
  TensorDtype dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;

  char* address() const { return static_cast<char*>(data) + byte_offset; }
};

// DLPackExchangeAPI. The functions set a Python exception where they return other than 0.
struct ExchangeApi {
  struct Header {
    std::uint32_t major;
    std::uint32_t minor;
    Header* previous;  // the table of an older major version, or nullptr
  };

  Header header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  // Neither copies nor waits for a stream; nullptr if the library has no such thing.
  int (*view_from_py_object)(void* object, TensorView* view);
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);

  // The table of a tensor type, of the version declared here; nullptr, without an exception, if the
  // type has none.
  static const ExchangeApi* Find(PyObject* type) {
    PyObject* capsule = PyObject_GetAttrString(type, kExchangeAttribute);
    void* table = capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, kExchangeCapsule);
    // The table outlives the process's use of the library, so the capsule need not be kept.
    Py_XDECREF(capsule);
    if (table == nullptr) PyErr_Clear();
    auto* header = static_cast<Header*>(table);
    while (header != nullptr && header->major != kExchangeMajorVersion) header = header->previous;
    const auto* api = reinterpret_cast<const ExchangeApi*>(header);
    const bool is_whole = api != nullptr && api->view_from_py_object != nullptr &&
                          api->current_work_stream != nullptr;
    return is_whole ? api : nullptr;
  }
};

static_assert(sizeof(TensorView) == 48 && sizeof(ExchangeApi::Header) == 16 &&
                  sizeof(ExchangeApi) == 56,
              "the layouts of DLPack 1");

}  // namespace stoneware::call
