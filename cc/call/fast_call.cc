#include "cc/call/fast_call.h"

#include <algorithm>
#include <utility>

namespace stoneware::call {
namespace {

// Word 0 of a tensor that is absent; present ones have their rank plus one in the upper half.
constexpr std::uint64_t kAbsent = 0;

std::uint64_t Word(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

// The int that a function returns; -1 with an exception.
long CallForInt(const NativeFunction& function) {
  const nb::object number = function();
  return number ? PyLong_AsLong(number.ptr()) : -1;
}

// 1 if `answer` is true, 0 if not, -1 with an exception; so is an empty `answer`.
int IsTrue(nb::object answer) { return answer ? PyObject_IsTrue(answer.ptr()) : -1; }

}  // namespace

std::uint64_t FastCall::Key::Hash() const {
  // Two chains of a multiplication a word, which the processor runs side by side; the multipliers
  // are odd digits of the golden ratio and of the square root of 2.
  constexpr std::uint64_t kFirst = 0x9E3779B97F4A7C15;
  constexpr std::uint64_t kSecond = 0x6A09E667F3BCC909;
  std::uint64_t even = static_cast<std::uint64_t>(size);
  std::uint64_t odd = 0;
  for (int i = 0; i + 1 < size; i += 2) {
    even = (even ^ words[i]) * kFirst;
    odd = (odd ^ words[i + 1]) * kSecond;
  }
  if (size % 2 != 0) even = (even ^ words[size - 1]) * kFirst;
  const std::uint64_t hash = (even ^ (odd >> 32 | odd << 32)) * kFirst;
  return hash ^ hash >> 32;
}

FastCall::FastCall(Signature signature, TorchFunctions torch, const ExchangeApi& api,
                   nb::object make, nb::object slow, nb::object state, nb::object epoch,
                   nb::object enter_thread, std::size_t max_plans)
    : signature_(std::move(signature)),
      torch_(std::move(torch)),
      api_(api),
      make_(std::move(make)),
      slow_(std::move(slow)),
      state_(std::move(state)),
      epoch_(std::move(epoch)),
      enter_thread_(std::move(enter_thread)),
      get_requires_grad_(reinterpret_cast<descrgetfunc>(
          PyType_GetSlot(Py_TYPE(torch_.requires_grad.ptr()), Py_tp_descr_get))),
      current_level_(nb::steal(PyUnicode_InternFromString("_current_level"))),
      max_plans_(max_plans),
      objects_(nb::steal(PyDict_New())) {}

PyObject* FastCall::Call(PyObject* const* arguments, Py_ssize_t num_arguments) {
  std::array<PyObject*, kMaxTensors> completed;
  if (num_arguments >= LeastNumber() && num_arguments < signature_.num_tensors) {
    std::copy(arguments, arguments + num_arguments, completed.begin());
    std::fill(completed.begin() + num_arguments, completed.end(), Py_None);
    arguments = completed.data();
    num_arguments = signature_.num_tensors;
  }
  if (!CheckNumber(num_arguments)) return nullptr;
  std::array<TensorView, kMaxTensors> views{};  // of an absent tensor: without memory
  Key key;
  const auto call_slow = [this, arguments, num_arguments] {
    // It refuses what could not be read, with a message of this package.
    PyErr_Clear();
    ++num_slow_;
    return PyObject_Vectorcall(slow_.ptr(), arguments, static_cast<std::size_t>(num_arguments),
                               nullptr);
  };
  if (!Read(arguments, views.data(), &key) || IsUnusual(arguments, views.data())) {
    return call_slow();
  }
  bool is_known = false;
  const SharedMade made = FindOrMake(arguments, views.data(), &key, &is_known);
  if (made == nullptr) return nullptr;
  const auto is_absent = [arguments](int position) { return arguments[position] == Py_None; };
  bool is_direct =
      made->direct.step && std::all_of(signature_.outs.begin(), signature_.outs.end(), is_absent);
  // Autocast changes the dtypes of torch's functions, unless they write to out. A layer's calls
  // have cast before.
  if (is_direct && !signature_.is_layer && IsTrue(torch_.is_autocast_enabled()) != 0) {
    PyErr_Clear();
    is_direct = false;
  }
  // What is direct in a layer is a node of autograd, whose own calls are native.
  const bool reads_memory = !is_direct || signature_.is_layer;
  if (reads_memory && HasNegated(arguments, views.data())) return call_slow();
  num_hits_ += is_known;
  if (is_direct) return CallStep(made->direct, arguments, views[0].device).release().ptr();
  return Run(*made, arguments, views.data());
}

PyObject* FastCall::Plan(PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (!CheckNumber(num_arguments)) return nullptr;
  std::array<TensorView, kMaxTensors> views;
  Key key;
  bool is_known = false;
  const bool is_read = Read(arguments, views.data(), &key);
  if (!is_read) PyErr_Clear();
  const SharedMade made =
      is_read ? FindOrMake(arguments, views.data(), &key, &is_known) : Make(arguments);
  return made == nullptr ? nullptr : nb::object(made->plan).release().ptr();
}

bool FastCall::CheckNumber(Py_ssize_t num_arguments) const {
  const int expected = signature_.num_tensors + signature_.num_objects;
  if (num_arguments == expected) return true;
  PyErr_Format(PyExc_TypeError, "a call must have %d arguments, but has %zd; pass each of them",
               expected, num_arguments);
  return false;
}

Py_ssize_t FastCall::LeastNumber() const {
  const bool may_omit = signature_.num_objects == 0;
  return may_omit ? *std::min_element(signature_.outs.begin(), signature_.outs.end())
                  : signature_.num_tensors + signature_.num_objects;
}

bool FastCall::Read(PyObject* const* arguments, TensorView* views, Key* key) const {
  std::uint64_t misaligned = 0;
  for (int i = 0; i < signature_.num_tensors; ++i) {
    PyObject* tensor = arguments[i];
    if (tensor == Py_None) {
      if ((signature_.optional >> i & 1) == 0) return false;
      key->Add(kAbsent);
      continue;
    }
    TensorView& view = views[i];
    if (api_.view_from_py_object(tensor, &view) != 0 || view.num_dims > kMaxDims) return false;
    key->Add(static_cast<std::uint64_t>(view.num_dims + 1) << 32 |
             static_cast<std::uint64_t>(view.dtype.lanes) << 16 |
             static_cast<std::uint64_t>(view.dtype.bits) << 8 | view.dtype.code);
    key->Add(static_cast<std::uint64_t>(static_cast<std::uint32_t>(view.device.type)) << 32 |
             static_cast<std::uint32_t>(view.device.id));
    bool is_empty = false;
    for (int dim = 0; dim < view.num_dims; ++dim) {
      key->Add(static_cast<std::uint64_t>(view.shape[dim]));
      key->Add(static_cast<std::uint64_t>(view.strides[dim]));
      is_empty |= view.shape[dim] == 0;
    }
    if (view.data == nullptr && !is_empty) return false;
    if (signature_.aligned >> i & 1) {
      misaligned |= static_cast<std::uint64_t>(Word(view.address()) % kAlignment != 0) << i;
    }
  }
  key->Add(misaligned);
  return true;
}

bool FastCall::IsUnusual(PyObject* const* arguments, const TensorView* views) const {
  if (CallForInt(torch_.num_dispatch_modes) != 0 || IsInDualLevel()) return true;
  for (int i = 0; i < signature_.num_tensors; ++i) {
    PyObject* tensor = arguments[i];
    if (tensor == Py_None) continue;
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    if (type != torch_.tensor.ptr() && type != torch_.parameter.ptr()) return true;
  }
  if (!signature_.is_layer) return GradientBits(arguments, views) != 0;
  return IsTrue(nb::steal(PyObject_CallNoArgs(torch_.has_transforms.ptr()))) != 0 ||
         (!signature_.is_cast && IsTrue(torch_.is_autocast_enabled()) != 0);
}

bool FastCall::HasNegated(PyObject* const* arguments, const TensorView* views) const {
  for (int i = 0; i < signature_.num_tensors; ++i) {
    if (arguments[i] == Py_None || views[i].dtype.is_fp8()) continue;  // torch negates no fp8
    if (IsTrue(torch_.is_neg.Of(arguments[i])) != 0) return true;
  }
  return false;
}

std::uint32_t FastCall::GradientBits(PyObject* const* arguments, const TensorView* views) const {
  constexpr std::uint32_t kUnknown = ~std::uint32_t{0};
  const int is_enabled = IsTrue(torch_.is_grad_enabled());
  if (is_enabled <= 0) return is_enabled < 0 ? kUnknown : 0;
  std::uint32_t bits = 0;
  for (int i = 0; i < signature_.num_tensors; ++i) {
    if (arguments[i] == Py_None || views[i].dtype.is_integer()) continue;
    // Without a look-up of the attribute: Parameter has torch.Tensor's, and IsUnusual() lets no
    // other subclass through.
    PyObject* tensor = arguments[i];
    const int is_required = IsTrue(nb::steal(get_requires_grad_(
        torch_.requires_grad.ptr(), tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor)))));
    if (is_required < 0) return kUnknown;
    bits |= static_cast<std::uint32_t>(is_required) << i;
  }
  return bits;
}

bool FastCall::IsInDualLevel() const {
  PyObject* level = PyDict_GetItemWithError(torch_.forward_ad.ptr(), current_level_.ptr());
  // What cannot be read is for `slow`, which asks torch in another way.
  return level == nullptr || PyLong_AsLong(level) != -1 || PyErr_Occurred() != nullptr;
}

FastCall::SharedMade FastCall::FindOrMake(PyObject* const* arguments, const TensorView* views,
                                          Key* key, bool* is_known) {
  if (signature_.is_layer) key->Add(GradientBits(arguments, views));
  const unsigned long long epoch = PyLong_AsUnsignedLongLong(PyList_GetItem(epoch_.ptr(), 0));
  if (PyErr_Occurred() != nullptr) return nullptr;
  key->Add(epoch);
  // Kept until the end of the look-up: its address is part of the key.
  const nb::object state = nb::steal(PyObject_CallNoArgs(state_.ptr()));
  if (!state) return nullptr;
  key->first_object = key->size;
  for (int i = 0; i < signature_.num_objects; ++i) {
    key->Add(Word(arguments[signature_.num_tensors + i]));
  }
  key->Add(Word(state.ptr()));

  SharedMade made = Find(*key);
  bool has_key = true;
  if (made == nullptr) {
    // An object may be equal to a known one without being it. Comparing objects may run Python, in
    // which another thread may clear the table.
    const nb::object objects = objects_;
    has_key = MakeCanonical(arguments, state.ptr(), objects.ptr(), /*adds=*/false, key);
    if (has_key) made = Find(*key);
    PyErr_Clear();  // an object that cannot be hashed; the checks say which
  }
  *is_known = made != nullptr;
  if (*is_known) return made;

  made = Make(arguments);
  if (made == nullptr || !made->is_kept || !has_key) return made;
  if (entries_.size() >= max_plans_) Clear();
  const nb::object objects = objects_;
  if (!MakeCanonical(arguments, state.ptr(), objects.ptr(), /*adds=*/true, key)) return nullptr;
  // Not if another thread was faster, or has cleared the table and with it the key's objects.
  if (objects.is(objects_) && Find(*key) == nullptr) {
    entries_.emplace(key->Hash(),
                     Entry{{key->words.begin(), key->words.begin() + key->size}, made});
  }
  return made;
}

FastCall::SharedMade FastCall::Find(const Key& key) const {
  const auto [first, last] = entries_.equal_range(key.Hash());
  for (auto found = first; found != last; ++found) {
    const std::vector<std::uint64_t>& words = found->second.words;
    if (words.size() == static_cast<std::size_t>(key.size) &&
        std::equal(words.begin(), words.end(), key.words.begin())) {
      return found->second.made;
    }
  }
  return nullptr;
}

bool FastCall::MakeCanonical(PyObject* const* arguments, PyObject* state, PyObject* objects,
                             bool adds, Key* key) const {
  for (int i = 0; i <= signature_.num_objects; ++i) {
    PyObject* object = i < signature_.num_objects ? arguments[signature_.num_tensors + i] : state;
    PyObject* known = PyDict_GetItemWithError(objects, object);
    if (known == nullptr && PyErr_Occurred()) return false;
    if (known == nullptr && adds && PyDict_SetItem(objects, object, object) != 0) return false;
    key->words[key->first_object + i] = Word(known != nullptr ? known : object);
  }
  return true;
}

FastCall::SharedMade FastCall::Make(PyObject* const* arguments) {
  ++num_made_;
  nb::object returned = nb::steal(PyObject_Vectorcall(
      make_.ptr(), arguments,
      static_cast<std::size_t>(signature_.num_tensors + signature_.num_objects), nullptr));
  if (!returned) return nullptr;
  MadePlan made;
  if (!ReadPlan(std::move(returned), signature_, torch_.uint8, &made)) return nullptr;
  return std::make_shared<const MadePlan>(std::move(made));
}

void FastCall::Clear() {
  // Taken out first: the end of a plan may run Python.
  std::unordered_multimap<std::uint64_t, Entry> entries;
  entries.swap(entries_);
  nb::object objects = nb::steal(PyDict_New());
  std::swap(objects, objects_);
}

nb::object FastCall::CallStep(const Launch& launch, PyObject* const* tensors,
                              const TensorDevice& device) {
  static thread_local bool has_entered = false;
  if (!has_entered && device.type == kCuda) {
    if (!nb::steal(PyObject_CallNoArgs(enter_thread_.ptr()))) return nb::object();
    has_entered = true;
  }
  std::array<PyObject*, kMaxTensors> own;
  std::size_t size = 0;
  for (const int position : launch.tensors) own[size++] = tensors[position];
  for (const nb::object& value : launch.values) own[size++] = value.ptr();
  return nb::steal(PyObject_Vectorcall(launch.step.ptr(), own.data(), size, nullptr));
}

PyObject* FastCall::Run(const MadePlan& made, PyObject* const* arguments, TensorView* views) {
  // By position; that of an input is empty, as is that of an output in the workspace.
  std::array<nb::object, kMaxTensors> outs;
  nb::object workspace;
  Allocator allocator;
  if (!Outputs(made, arguments, views, &allocator, outs.data(), &workspace)) return nullptr;
  void* stream = nullptr;
  const TensorDevice& device = views[0].device;
  if (made.is_native && api_.current_work_stream(device.type, device.id, &stream) != 0) {
    return nullptr;
  }
  // What a step in Python takes; those of the workspace have no tensor.
  std::array<PyObject*, kMaxTensors> tensors;
  for (int i = 0; i < signature_.num_tensors; ++i) {
    tensors[i] = outs[i] ? outs[i].ptr() : arguments[i];
  }
  for (const Launch& launch : made.launches) {
    if (launch.native == nullptr) {
      nb::object returned = CallStep(launch, tensors.data(), device);
      if (!returned) return nullptr;
      if (launch.result < 0) continue;
      if (api_.view_from_py_object(returned.ptr(), &views[launch.result]) != 0) return nullptr;
      tensors[launch.result] = returned.ptr();
      outs[launch.result] = std::move(returned);
      continue;
    }
    if (!LaunchNative(made, launch, views, &allocator, stream)) return nullptr;
  }
  if (signature_.num_results == 1) return outs[signature_.outs[0]].release().ptr();
  const auto num_results = static_cast<Py_ssize_t>(signature_.num_results);
  nb::object all = nb::steal(PyTuple_New(num_results));
  for (Py_ssize_t i = 0; all && i < num_results; ++i) {
    PyTuple_SetItem(all.ptr(), i, outs[signature_.outs[i]].release().ptr());
  }
  return all.release().ptr();
}

bool FastCall::LaunchNative(const MadePlan& made, const Launch& launch, const TensorView* views,
                            Allocator* allocator, void* stream) const {
  std::array<void*, kMaxTensors + 1> addresses;
  const std::size_t num_tensors = launch.tensors.size();
  for (std::size_t i = 0; i < num_tensors; ++i) {
    addresses[i] = views[launch.tensors[i]].address();
  }
  nb::object workspace;  // torch's allocator gives it to later work on this stream
  if (launch.workspace) {
    TensorView view;
    workspace = Allocate(made, *launch.workspace, views[0].device, allocator, &view);
    if (!workspace) return false;
    addresses[num_tensors] = view.address();
  }
  return launch.native->launch(launch.native, addresses.data(), stream) == 0;
}

nb::object FastCall::Allocate(const MadePlan& made, const Output& output,
                              const TensorDevice& device, Allocator* allocator,
                              TensorView* view) const {
  if (!allocator->is_known && !Prepare(device, allocator)) return nb::object();
  PyObject* const empty_strided = allocator->empty_strided;
  const auto& [shape, strides, dtype] = output;
  PyObject* const values[] = {shape.ptr(), strides.ptr(), dtype.ptr(), made.device.ptr()};
  nb::object tensor;
  if (empty_strided != nullptr) {
    tensor = nb::steal(PyObject_Vectorcall(empty_strided, values, 3, nullptr));
  } else if (const nb::object keywords = nb::steal(Py_BuildValue("(ss)", "dtype", "device"))) {
    tensor = nb::steal(PyObject_Vectorcall(torch_.empty_strided.ptr(), values, 2, keywords.ptr()));
  }
  if (tensor && api_.view_from_py_object(tensor.ptr(), view) != 0) return nb::object();
  return tensor;
}

bool FastCall::Outputs(const MadePlan& made, PyObject* const* arguments, TensorView* views,
                       Allocator* allocator, nb::object* outs, nb::object* workspace) const {
  bool has_all = true;
  bool has_any_in_between = false;
  for (std::size_t i = 0; i < signature_.outs.size(); ++i) {
    const int position = signature_.outs[i];
    if (arguments[position] == Py_None) {
      has_all = false;
      continue;
    }
    if ((made.returned >> position & 1) != 0) {
      PyErr_Format(PyExc_ValueError, "tensor %d must be None, because a step returns it; omit it",
                   position);
      return false;
    }
    outs[position] = nb::borrow(arguments[position]);
    has_any_in_between |= i >= signature_.num_results;
  }
  if (has_all) return true;
  const TensorDevice& device = views[0].device;  // of the first tensor, which is never None
  std::size_t num_allocated = signature_.outs.size();
  if (made.workspace && !has_any_in_between) {
    num_allocated = signature_.num_results;
    TensorView whole;
    *workspace = Allocate(made, *made.workspace, device, allocator, &whole);
    if (!*workspace) return false;
    for (std::size_t i = 0; i < made.offsets.size(); ++i) {
      TensorView& view = views[signature_.outs[num_allocated + i]];
      view.data = whole.address() + made.offsets[i];
      view.byte_offset = 0;
    }
  }
  for (std::size_t i = 0; i < num_allocated; ++i) {
    const int position = signature_.outs[i];
    if (outs[position] || (made.returned >> position & 1) != 0) continue;
    outs[position] = Allocate(made, made.outputs[i], device, allocator, &views[position]);
    if (!outs[position]) return false;
  }
  return true;
}

bool FastCall::Prepare(const TensorDevice& device, Allocator* allocator) const {
  PyObject* empty_strided = device.type == kCpu ? torch_.empty_strided_cpu.ptr() : nullptr;
  if (device.type == kCuda && torch_.current_cuda_device) {
    // It allocates on the current device, which may not be the call's.
    const long current = CallForInt(torch_.current_cuda_device);
    if (current == device.id) empty_strided = torch_.empty_strided_cuda.ptr();
  }
  // A torch function mode expects to see a function of torch's.
  const long num_modes = PyErr_Occurred() != nullptr ? -1 : CallForInt(torch_.num_function_modes);
  allocator->empty_strided = num_modes == 0 ? empty_strided : nullptr;
  allocator->is_known = num_modes >= 0;
  return allocator->is_known;
}

// Py_VISIT takes the name `arg`.
int FastCall::Traverse(visitproc visit, void* arg) const {
  for (const nb::object* object :
       {&torch_.tensor, &torch_.parameter, &torch_.requires_grad, &torch_.empty_strided,
        &torch_.empty_strided_cpu, &torch_.empty_strided_cuda, &torch_.uint8,
        &torch_.has_transforms, &torch_.forward_ad, &make_, &slow_, &state_, &epoch_,
        &enter_thread_, &objects_}) {
    Py_VISIT(object->ptr());
  }
  for (const auto& [hash, entry] : entries_) {
    const MadePlan& made = *entry.made;
    Py_VISIT(made.plan.ptr());
    Py_VISIT(made.device.ptr());
    Py_VISIT(made.direct.step.ptr());
    for (const nb::object& value : made.direct.values) Py_VISIT(value.ptr());
    for (const Launch& launch : made.launches) Py_VISIT(launch.step.ptr());
    for (const auto& [shape, strides, dtype] : made.outputs) {
      Py_VISIT(shape.ptr());
      Py_VISIT(strides.ptr());
      Py_VISIT(dtype.ptr());
    }
  }
  return 0;
}

}  // namespace stoneware::call
