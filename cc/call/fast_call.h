// The plans of an op, and its calls that need no Python because their plan is known.
//
// An op is some tensors, of which some may be None and one is the output, followed by some other
// objects (a dtype, a backend's name, a config). Everything that its checks and its plan depend on
// is a key of some 30 words: dtype, device, shape and strides of each tensor, which of them are
// misaligned, the identity of each object, the state of sw.tuning and its epoch. A call whose key
// is known is run by the plan without further checks. A new epoch makes every plan stale: its key
// is never asked for again, and it leaves the table as the oldest do.
//
// Where the key is not known, `make` is asked for a plan, in Python. Where a call is unusual,
// `slow` does all of it, and asks `Plan` for the plan: a gradient is needed, forward-mode AD or a
// torch dispatch mode is on, an argument is a negated view, a subclass of torch.Tensor or no dense
// tensor.
//
// Everything here runs with the GIL held, which makes it safe for threads, and for a fork while
// other threads run: there is no lock. What is read from the table is taken along before anything
// that may run Python or release the GIL.

#pragma once

#include <Python.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc/call/exchange_api.h"
#include "cc/call/native_launch.h"

namespace stoneware::call {

inline constexpr int kMaxTensors = 12;
inline constexpr int kMaxObjects = 8;
inline constexpr int kMaxDims = 6;

// Owns one reference.
class Reference {
 public:
  Reference() = default;
  static Reference Stolen(PyObject* object) { return Reference(object); }
  static Reference Borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Reference(object);
  }
  Reference(Reference&& other) noexcept : object_(other.Release()) {}
  Reference& operator=(Reference&& other) noexcept {
    PyObject* old = object_;
    object_ = other.Release();
    Py_XDECREF(old);
    return *this;
  }
  ~Reference() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }
  PyObject* Release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }

 private:
  explicit Reference(PyObject* object) : object_(object) {}

  PyObject* object_ = nullptr;
};

// What an op's calls look like.
struct Signature {
  int num_tensors = 0;          // the first arguments
  int num_objects = 0;          // the arguments after them
  int out = 0;                  // the tensor that is allocated where it is None
  std::uint32_t optional = 0;   // a bit per tensor that may be None
  std::uint32_t aligned = 0;    // a bit per tensor of whose address the plan depends on alignment
  std::vector<int> plan_order;  // the tensors, in the order of a plan's arguments
};

// A function of torch's that takes nothing but `self`, called past Python's own call protocol,
// which takes longer than the function: each is called at every call of an op.
class NativeFunction {
 public:
  NativeFunction() = default;
  // `bound` is a built-in function, or a method bound to whatever it was taken of; empty if it is
  // something else, or takes arguments.
  explicit NativeFunction(PyObject* bound) {
    if (!PyCFunction_Check(bound) || PyCFunction_GetFlags(bound) != METH_NOARGS) return;
    function_ = PyCFunction_GetFunction(bound);
    self_ = Reference::Borrowed(PyCFunction_GetSelf(bound));
  }

  explicit operator bool() const { return function_ != nullptr; }
  Reference operator()() const { return Of(self_.get()); }
  // As the method of another object of the same type.
  Reference Of(PyObject* self) const { return Reference::Stolen(function_(self, nullptr)); }

 private:
  PyCFunction function_ = nullptr;
  Reference self_;
};

// Torch callables, resolved once.
struct TorchFunctions {
  Reference tensor;     // the type torch.Tensor
  Reference parameter;  // the type torch.nn.Parameter
  NativeFunction is_grad_enabled;
  Reference requires_grad;  // the descriptor of torch.Tensor's attribute
  NativeFunction is_neg;    // a method of tensors
  NativeFunction num_dispatch_modes;
  NativeFunction num_function_modes;
  Reference empty;
  Reference empty_strided_cpu;         // (shape, strides, dtype); nullptr: `empty` is called
  Reference empty_strided_cuda;        // the same, on the current device
  NativeFunction current_cuda_device;  // its number; empty: as without empty_strided_cuda
  Reference forward_ad;                // the dict of the module torch.autograd.forward_ad
};

class FastCall {
 public:
  // Bytes; what `Signature::aligned` is about.
  static constexpr std::uintptr_t kAlignment = 16;

  // `make(*arguments)` returns (plan, is_kept, shape, strides, dtype, device): the plan, whether it
  // holds for later calls, and what to allocate for an output of None. `slow(*arguments)` is the
  // whole call. `state()` is an object that is part of the key, and so is the int that the list
  // `epoch` holds. `workspace(num_bytes, tensor)` returns a tensor for a launch on the current
  // stream of that tensor's device. At most `max_plans` are kept.
  FastCall(Signature signature, TorchFunctions torch, const ExchangeApi& api, Reference make,
           Reference slow, Reference state, Reference epoch, Reference workspace,
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

  int Traverse(visitproc visit, void* argument) const;

 private:
  // Room for every word of a key: presence with dtype and rank, device, extents, strides; the
  // misaligned tensors; the epoch; the objects and the state.
  static constexpr int kMaxWords = kMaxTensors * (2 + 2 * kMaxDims) + 2 + kMaxObjects + 1;

  struct Key {
    std::array<std::uint64_t, kMaxWords> words;
    int size = 0;
    int first_object = 0;

    void Add(std::uint64_t word) { words[size++] = word; }
    std::uint64_t Hash() const;
  };

  struct Allocation {
    Reference shape;
    Reference strides;
    Reference dtype;
    Reference device;
  };

  struct Entry {
    std::vector<std::uint64_t> words;
    std::uint64_t hash = 0;
    std::uint64_t number = 0;  // counts up; entries leave in this order
    Reference plan;
    Reference capsule;  // the plan's native_launch, or nullptr
    const NativeLaunch* launch = nullptr;
    Allocation allocation;
    std::vector<Reference> objects;  // whose addresses are words of the key
  };

  // What one call takes along from an Entry, which may go while the call still runs.
  struct Taken {
    Reference plan;
    Reference capsule;
    const NativeLaunch* launch = nullptr;
    Allocation allocation;
    bool is_new = false;  // made for this call

    void Take(const Entry& entry);
  };

  // False, with an exception, for a wrong number of arguments.
  bool CheckNumber(Py_ssize_t num_arguments) const;
  // Fills views and the key's words of the tensors; false where an argument is no dense tensor.
  bool Read(PyObject* const* arguments, TensorView* views, Key* key) const;
  // Whether a call needs more than its plan.
  bool IsUnusual(PyObject* const* arguments, const TensorView* views) const;
  // Whether a gradient would be needed.
  bool NeedsGradient(PyObject* const* arguments, const TensorView* views) const;
  // Whether tensors may be dual ones, with a tangent, which no plan follows.
  bool IsInDualLevel() const;
  // Takes the plan of a call whose tensors are read, from the table or from `make`; false with an
  // exception.
  bool TakePlan(PyObject* const* arguments, Key* key, Taken* taken);
  const Entry* Find(const Key& key) const;
  // Replaces each object of the key by the equal one that stands in the table's keys; false where
  // an object cannot be part of a key. With `adds`, an object that is new becomes that one.
  bool MakeCanonical(PyObject* const* arguments, PyObject* state, Key* key, bool adds);
  // Asks `make`; false with an exception. `is_kept` becomes whether the plan holds for later calls.
  bool Make(PyObject* const* arguments, Taken* taken, bool* is_kept);
  void Insert(const Key& key, const Taken& taken);
  // Moves the oldest entry out, and with it the objects that no other key has.
  void Evict(std::vector<Entry>* entries, std::vector<PyObject*>* objects);
  PyObject* Run(const Taken& taken, PyObject* const* arguments, TensorView* views);
  Reference Allocate(const Allocation& allocation, const TensorDevice& device, TensorView* view);

  const Signature signature_;
  const TorchFunctions torch_;
  const ExchangeApi& api_;
  const Reference make_;
  const Reference slow_;
  const Reference state_;
  const Reference epoch_;
  const Reference workspace_;
  const descrgetfunc get_requires_grad_;  // of the descriptor's type
  const Reference current_level_;         // the name of the number of the dual level
  const std::size_t max_plans_;

  std::unordered_multimap<std::uint64_t, Entry> entries_;       // by hash
  std::deque<std::pair<std::uint64_t, std::uint64_t>> oldest_;  // (hash, number) in order of age
  Reference objects_;  // object -> object, of every object whose address is a word of a key
  std::unordered_map<PyObject*, std::size_t> num_uses_;  // by how many entries, of each of them
  std::uint64_t num_entered_ = 0;
  std::uint64_t num_hits_ = 0;
  std::uint64_t num_made_ = 0;
  std::uint64_t num_slow_ = 0;
};

}  // namespace stoneware::call
