// The plans of an op, and its calls that need no Python because their plan is known.
//
// An op takes tensors, of which some may be None and some are outputs, and then other objects (a
// dtype, a backend's name, a config). Everything that its checks and its plan depend on is a key of
// some 30 words: dtype, device, shape and strides of each tensor, which of them are misaligned, the
// identity of each object, the state of sw.tuning and its epoch. A call whose key is known is run
// by the plan without further checks. A new epoch makes every plan stale: no later call has its
// key. A full table is emptied.
//
// If the table lacks the key, `make` makes a plan, in Python. An unusual call is passed to `slow`
// as a whole, which gets the plan from `Plan`: a gradient is needed, forward-mode AD or a torch
// dispatch mode is on, an argument is a negated view, a subclass of torch.Tensor or not a dense
// tensor.
//
// A plan may be direct: a function that takes the tensors and returns a new result, such as
// torch.mm. Then nothing is allocated here, nothing runs in between, and, except in a layer, it may
// get negated views.
//
// The calls of a layer follow gradients: a call that needs some is usual, and its key has the
// inputs that require one. What runs is direct, and known to autograd.
//
// Everything here runs with the GIL held, which makes it safe for threads, and for a fork while
// other threads run: no lock is used. A call shares its plan with the table, which another thread
// may change whenever Python runs or the GIL is released.

#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "cc/call/exchange_api.h"
#include "cc/call/made_plan.h"

namespace stoneware::call {

inline constexpr int kMaxDims = 6;

// A function of torch that takes only `self`. Calling it directly avoids Python's call protocol,
// which takes longer than the function; every call of an op calls each of them.
class NativeFunction {
 public:
  NativeFunction() = default;
  // `bound` is a built-in function or a bound built-in method. Empty if it is something else or
  // takes arguments.
  explicit NativeFunction(PyObject* bound) {
    if (!PyCFunction_Check(bound) || PyCFunction_GetFlags(bound) != METH_NOARGS) return;
    function_ = PyCFunction_GetFunction(bound);
    self_ = nb::borrow(PyCFunction_GetSelf(bound));
  }

  explicit operator bool() const { return function_ != nullptr; }
  nb::object operator()() const { return Of(self_.ptr()); }
  // As the method of another object of the same type.
  nb::object Of(PyObject* self) const { return nb::steal(function_(self, nullptr)); }

 private:
  PyCFunction function_ = nullptr;
  nb::object self_;
};

// Torch callables, resolved once.
struct TorchFunctions {
  nb::object tensor;     // the type torch.Tensor
  nb::object parameter;  // the type torch.nn.Parameter
  NativeFunction is_grad_enabled;
  nb::object requires_grad;  // the descriptor of torch.Tensor's attribute
  NativeFunction is_neg;     // a method of tensors
  NativeFunction num_dispatch_modes;
  NativeFunction num_function_modes;
  nb::object empty_strided;       // torch.empty_strided
  nb::object empty_strided_cpu;   // (shape, strides, dtype); nullptr: `empty_strided` is called
  nb::object empty_strided_cuda;  // the same, on the current device
  nb::object uint8;               // the dtype
  NativeFunction is_autocast_enabled;  // on any device
  NativeFunction current_cuda_device;  // its number; empty: as without empty_strided_cuda
  nb::object has_transforms;           // whether transforms of torch.func are active
  nb::object forward_ad;               // the dict of the module torch.autograd.forward_ad
};

class FastCall {
 public:
  // Bytes; what `Signature::aligned` is about.
  static constexpr std::uintptr_t kAlignment = 16;

  // call_module.cc documents the arguments.
  FastCall(Signature signature, TorchFunctions torch, const ExchangeApi& api, nb::object make,
           nb::object slow, nb::object state, nb::object epoch, nb::object enter_thread,
           std::size_t max_plans);
  ~FastCall() { Clear(); }

  FastCall(const FastCall&) = delete;
  FastCall& operator=(const FastCall&) = delete;

  // As METH_FASTCALL: borrowed arguments, a new reference or nullptr with an exception.
  PyObject* Call(PyObject* const* arguments, Py_ssize_t num_arguments);
  // The plan of a call, usual or not, from the table or made; references as in Call.
  PyObject* Plan(PyObject* const* arguments, Py_ssize_t num_arguments);

  // Forgets every plan.
  void Clear();

  std::size_t size() const { return entries_.size(); }
  std::uint64_t num_hits() const { return num_hits_; }
  std::uint64_t num_made() const { return num_made_; }
  std::uint64_t num_slow() const { return num_slow_; }

  int Traverse(visitproc visit, void* arg) const;

 private:
  // Room for every word of a key: presence with dtype and rank, device, extents, strides; which
  // tensors are misaligned, which require a gradient; the epoch; the objects and the state.
  static constexpr int kMaxWords = kMaxTensors * (2 + 2 * kMaxDims) + 3 + kMaxObjects + 1;

  struct Key {
    std::array<std::uint64_t, kMaxWords> words;
    int size = 0;
    int first_object = 0;

    void Add(std::uint64_t word) { words[size++] = word; }
    std::uint64_t Hash() const;
  };

  using SharedMade = std::shared_ptr<const MadePlan>;

  // How a call allocates, found out at its first allocation.
  struct Allocator {
    bool is_known = false;
    // What allocates without torch's parsing of arguments, or nullptr.
    PyObject* empty_strided = nullptr;
  };

  struct Entry {
    std::vector<std::uint64_t> words;
    SharedMade made;
  };

  // False, with an exception, for a wrong number of arguments.
  bool CheckNumber(Py_ssize_t num_arguments) const;
  // The fewest arguments of a call: without other objects, outputs at the end may be left out.
  Py_ssize_t LeastNumber() const;
  // Fills views and the key's words of the tensors; false if an argument is not a dense tensor.
  bool Read(PyObject* const* arguments, TensorView* views, Key* key) const;
  // Whether a call needs more than its plan.
  bool IsUnusual(PyObject* const* arguments, const TensorView* views) const;
  // Whether the memory of a tensor holds the negatives of its elements, which neither strides nor
  // DLPack show.
  bool HasNegated(PyObject* const* arguments, const TensorView* views) const;
  // A bit for each tensor that requires a gradient, if gradients are enabled; all, and maybe an
  // exception, if that cannot be found out.
  std::uint32_t GradientBits(PyObject* const* arguments, const TensorView* views) const;
  // Whether tensors may be dual ones, with a tangent, which no plan follows.
  bool IsInDualLevel() const;
  // The plan of a call whose tensors are read, from the table or from `make`, and which of them;
  // nullptr with an exception.
  SharedMade FindOrMake(PyObject* const* arguments, const TensorView* views, Key* key,
                        bool* is_known);
  SharedMade Find(const Key& key) const;
  // Replaces each object of the key by the equal one in `objects`; false if an object cannot be
  // hashed or compared. With `adds`, an object that is new is put there.
  bool MakeCanonical(PyObject* const* arguments, PyObject* state, PyObject* objects, bool adds,
                     Key* key) const;
  // Asks `make`; nullptr with an exception.
  SharedMade Make(PyObject* const* arguments);
  PyObject* Run(const MadePlan& made, PyObject* const* arguments, TensorView* views);
  // Calls a step in Python.
  nb::object CallStep(const Launch& launch, PyObject* const* tensors, const TensorDevice& device);
  // The outputs of a call by position, allocated where they are None; false with an exception.
  // Those in the workspace have a view, and no tensor; `workspace` owns their memory.
  bool Outputs(const MadePlan& made, PyObject* const* arguments, TensorView* views,
               Allocator* allocator, nb::object* outs, nb::object* workspace) const;
  // Finds out how to allocate on the call's device; false with an exception.
  bool Prepare(const TensorDevice& device, Allocator* allocator) const;
  // A new tensor on the call's device, and its view. Empty with an exception.
  nb::object Allocate(const MadePlan& made, const Output& output, const TensorDevice& device,
                      Allocator* allocator, TensorView* view) const;
  // Queues a native launch; false with an exception.
  bool LaunchNative(const MadePlan& made, const Launch& launch, const TensorView* views,
                    Allocator* allocator, void* stream) const;

  const Signature signature_;
  const TorchFunctions torch_;
  const ExchangeApi& api_;
  const nb::object make_;
  const nb::object slow_;
  const nb::object state_;
  const nb::object epoch_;
  const nb::object enter_thread_;
  const descrgetfunc get_requires_grad_;  // of the descriptor's type
  const nb::object current_level_;        // the name of the number of the dual level
  const std::size_t max_plans_;

  std::unordered_multimap<std::uint64_t, Entry> entries_;  // by hash
  nb::object objects_;  // object -> object, of every object whose address is a word of a key
  std::uint64_t num_hits_ = 0;
  std::uint64_t num_made_ = 0;
  std::uint64_t num_slow_ = 0;
};

}  // namespace stoneware::call
