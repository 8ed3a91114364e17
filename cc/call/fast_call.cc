#include "cc/call/fast_call.h"

#include <algorithm>

namespace stoneware::call {
namespace {

// Word 0 of a tensor that is absent; present ones have their rank plus one in the upper half.
constexpr std::uint64_t kAbsent = 0;

std::uint64_t Word(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

// Of a function of torch without arguments that returns an int; -1 with an exception.
long CallForInt(PyObject* function) {
  const Reference number = Reference::Stolen(PyObject_CallNoArgs(function));
  return number ? PyLong_AsLong(number.get()) : -1;
}

// 1, 0, or -1 with an exception, of a new reference or nullptr with an exception.
int IsTrue(Reference answer) { return answer ? PyObject_IsTrue(answer.get()) : -1; }

}  // namespace

std::uint64_t FastCall::Key::Hash() const {
  // A multiplication and a rotation a word; the multiplier is 2^64 divided by the golden ratio.
  constexpr std::uint64_t kMultiplier = 0x9E3779B97F4A7C15;
  std::uint64_t hash = static_cast<std::uint64_t>(size);
  for (int i = 0; i < size; ++i) {
    hash = (hash ^ words[i]) * kMultiplier;
    hash ^= hash >> 29;
  }
  return hash;
}

void FastCall::Taken::Take(const Entry& entry) {
  plan = Reference::Borrowed(entry.plan.get());
  capsule = Reference::Borrowed(entry.capsule.get());
  launch = entry.launch;
  allocation.shape = Reference::Borrowed(entry.allocation.shape.get());
  allocation.strides = Reference::Borrowed(entry.allocation.strides.get());
  allocation.dtype = Reference::Borrowed(entry.allocation.dtype.get());
  allocation.device = Reference::Borrowed(entry.allocation.device.get());
}

FastCall::FastCall(Signature signature, TorchFunctions torch, const ExchangeApi& api,
                   Reference make, Reference slow, Reference state, Reference workspace,
                   std::size_t max_plans)
    : signature_(std::move(signature)),
      torch_(std::move(torch)),
      api_(api),
      make_(std::move(make)),
      slow_(std::move(slow)),
      state_(std::move(state)),
      workspace_(std::move(workspace)),
      get_requires_grad_(reinterpret_cast<descrgetfunc>(
          PyType_GetSlot(Py_TYPE(torch_.requires_grad.get()), Py_tp_descr_get))),
      current_level_(Reference::Stolen(PyUnicode_InternFromString("_current_level"))),
      max_plans_(max_plans),
      objects_(Reference::Stolen(PyDict_New())) {}

PyObject* FastCall::Call(PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (num_arguments != signature_.num_tensors + signature_.num_objects) {
    PyErr_Format(PyExc_TypeError, "a call must have %d arguments, but has %zd; pass each of them",
                 signature_.num_tensors + signature_.num_objects, num_arguments);
    return nullptr;
  }
  std::array<TensorView, kMaxTensors> views;
  Key key;
  if (!Read(arguments, views.data(), &key)) {
    // What could not be read says so in `slow`, in words of ours.
    PyErr_Clear();
    return Slow(arguments, num_arguments);
  }
  // Kept until the end of the call: its address is part of the key.
  const Reference state = Reference::Stolen(PyObject_CallNoArgs(state_.get()));
  if (!state) return nullptr;
  key.first_object = key.size;
  for (int i = 0; i < signature_.num_objects; ++i) {
    key.Add(Word(arguments[signature_.num_tensors + i]));
  }
  key.Add(Word(state.get()));

  Taken taken;
  if (const Entry* entry = Find(key, key.Hash())) {
    taken.Take(*entry);
    ++num_hits_;
    return Run(taken, arguments, views.data());
  }
  // An object may be equal to one that is known without being it.
  if (!MakeCanonical(arguments, state.get(), &key, /*adds=*/false)) {
    PyErr_Clear();
    return Slow(arguments, num_arguments);
  }
  if (const Entry* entry = Find(key, key.Hash())) {
    taken.Take(*entry);
    ++num_hits_;
    return Run(taken, arguments, views.data());
  }
  if (!Make(arguments, state.get(), &key, &taken)) return nullptr;
  return Run(taken, arguments, views.data());
}

bool FastCall::Read(PyObject* const* arguments, TensorView* views, Key* key) {
  if (CallForInt(torch_.num_dispatch_modes.get()) != 0 || IsInDualLevel()) return false;
  std::uint64_t misaligned = 0;
  for (int i = 0; i < signature_.num_tensors; ++i) {
    PyObject* tensor = arguments[i];
    if (tensor == Py_None) {
      if ((signature_.optional >> i & 1) == 0) return false;
      key->Add(kAbsent);
      continue;
    }
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    if (type != torch_.tensor.get() && type != torch_.parameter.get()) return false;
    TensorView& view = views[i];
    if (api_.view_from_py_object(tensor, &view) != 0 || view.num_dims > kMaxDims) return false;
    key->Add(static_cast<std::uint64_t>(view.num_dims + 1) << 32 |
             static_cast<std::uint64_t>(view.dtype.lanes) << 16 |
             static_cast<std::uint64_t>(view.dtype.bits) << 8 | view.dtype.code);
    key->Add(static_cast<std::uint64_t>(static_cast<std::uint32_t>(view.device.type)) << 32 |
             static_cast<std::uint32_t>(view.device.id));
    bool is_empty = false;
    bool has_unit_stride = false;
    for (int dim = 0; dim < view.num_dims; ++dim) {
      key->Add(static_cast<std::uint64_t>(view.shape[dim]));
      key->Add(static_cast<std::uint64_t>(view.strides[dim]));
      is_empty |= view.shape[dim] == 0;
      has_unit_stride |= view.shape[dim] > 1 && view.strides[dim] == 1;
    }
    if (view.data == nullptr && !is_empty) return false;
    // A negated view is the imaginary part of a conjugate, so its elements lie two apart.
    if (!has_unit_stride && !is_empty &&
        IsTrue(Reference::Stolen(PyObject_Vectorcall(torch_.is_neg.get(), &tensor, 1, nullptr))) !=
            0) {
      return false;
    }
    if (signature_.aligned >> i & 1) {
      misaligned |= static_cast<std::uint64_t>(Word(view.address()) % kAlignment != 0) << i;
    }
  }
  key->Add(misaligned);
  return !NeedsGradient(arguments);
}

bool FastCall::NeedsGradient(PyObject* const* arguments) const {
  const int is_enabled =
      IsTrue(Reference::Stolen(PyObject_CallNoArgs(torch_.is_grad_enabled.get())));
  if (is_enabled <= 0) return is_enabled < 0;
  for (int i = 0; i < signature_.num_tensors; ++i) {
    if (arguments[i] == Py_None) continue;
    // Past the look-up of the attribute: Parameter has torch.Tensor's, and Read() lets no other
    // subclass through.
    PyObject* tensor = arguments[i];
    if (IsTrue(Reference::Stolen(get_requires_grad_(
            torch_.requires_grad.get(), tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor))))) !=
        0) {
      return true;
    }
  }
  return false;
}

bool FastCall::IsInDualLevel() const {
  PyObject* level = PyDict_GetItemWithError(torch_.forward_ad.get(), current_level_.get());
  // What cannot be read is for `slow`, which asks torch in another way.
  return level == nullptr || PyLong_AsLong(level) != -1 || PyErr_Occurred() != nullptr;
}

const FastCall::Entry* FastCall::Find(const Key& key, std::uint64_t hash) const {
  const auto [first, last] = entries_.equal_range(hash);
  for (auto found = first; found != last; ++found) {
    const std::vector<std::uint64_t>& words = found->second.words;
    if (words.size() == static_cast<std::size_t>(key.size) &&
        std::equal(words.begin(), words.end(), key.words.begin())) {
      return &found->second;
    }
  }
  return nullptr;
}

bool FastCall::MakeCanonical(PyObject* const* arguments, PyObject* state, Key* key, bool adds) {
  // Comparing objects may run Python, in which another thread may clear the table.
  const Reference objects = Reference::Borrowed(objects_.get());
  for (int i = 0; i <= signature_.num_objects; ++i) {
    PyObject* object =
        i < signature_.num_objects ? arguments[signature_.num_tensors + i] : state;
    PyObject* known = PyDict_GetItemWithError(objects.get(), object);
    if (known == nullptr && PyErr_Occurred()) return false;
    if (known == nullptr && adds && PyDict_SetItem(objects.get(), object, object) != 0) {
      return false;
    }
    key->words[key->first_object + i] = Word(known != nullptr ? known : object);
  }
  return true;
}

bool FastCall::Make(PyObject* const* arguments, PyObject* state, Key* key, Taken* taken) {
  ++num_made_;
  const std::uint64_t epoch = epoch_;
  const Reference made = Reference::Stolen(PyObject_Vectorcall(
      make_.get(), arguments,
      static_cast<std::size_t>(signature_.num_tensors + signature_.num_objects), nullptr));
  if (!made) return false;
  if (!PyTuple_Check(made.get()) || PyTuple_Size(made.get()) != 6) {
    PyErr_SetString(PyExc_TypeError,
                    "make must return (plan, is_kept, shape, strides, dtype, device)");
    return false;
  }
  const auto item = [&](Py_ssize_t i) {
    return Reference::Borrowed(PyTuple_GetItem(made.get(), i));
  };
  taken->plan = item(0);
  taken->allocation = {item(2), item(3), item(4), item(5)};
  taken->capsule =
      Reference::Stolen(PyObject_GetAttrString(taken->plan.get(), kNativeLaunchAttribute));
  if (taken->capsule.get() == Py_None) {
    taken->capsule = Reference();
  } else if (taken->capsule) {
    taken->launch = static_cast<const NativeLaunch*>(
        PyCapsule_GetPointer(taken->capsule.get(), kNativeLaunchCapsule));
    if (taken->launch == nullptr) return false;
    if (taken->launch->num_tensors != signature_.plan_order.size()) {
      PyErr_Format(PyExc_TypeError,
                   "a plan of this op must take %zu tensors, but its native launch takes %u",
                   signature_.plan_order.size(), taken->launch->num_tensors);
      return false;
    }
  } else if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
    PyErr_Clear();  // a plan in Python
  } else {
    return false;
  }
  const int is_kept = PyObject_IsTrue(PyTuple_GetItem(made.get(), 1));
  if (is_kept < 0 || !MakeCanonical(arguments, state, key, /*adds=*/is_kept != 0)) return false;
  // A plan that was decided before the table was cleared may be decided otherwise now.
  if (is_kept != 0 && epoch == epoch_) Insert(*key, *taken);
  return true;
}

void FastCall::Insert(const Key& key, const Taken& taken) {
  const std::uint64_t hash = key.Hash();
  if (Find(key, hash) != nullptr) return;  // another thread was faster
  Entry entry;
  entry.words.assign(key.words.begin(), key.words.begin() + key.size);
  entry.hash = hash;
  entry.number = num_entered_++;
  entry.plan = Reference::Borrowed(taken.plan.get());
  entry.capsule = Reference::Borrowed(taken.capsule.get());
  entry.launch = taken.launch;
  entry.allocation = {Reference::Borrowed(taken.allocation.shape.get()),
                      Reference::Borrowed(taken.allocation.strides.get()),
                      Reference::Borrowed(taken.allocation.dtype.get()),
                      Reference::Borrowed(taken.allocation.device.get())};
  oldest_.emplace_back(hash, entry.number);
  entries_.emplace(hash, std::move(entry));

  // Destroyed at the end, when the table is whole again: the end of a plan may run Python.
  std::vector<Entry> gone;
  while (entries_.size() > max_plans_) {
    const auto [old_hash, old_number] = oldest_.front();
    oldest_.pop_front();
    const auto [first, last] = entries_.equal_range(old_hash);
    for (auto found = first; found != last; ++found) {
      if (found->second.number != old_number) continue;
      gone.push_back(std::move(found->second));
      entries_.erase(found);
      break;
    }
  }
}

void FastCall::Clear() {
  // Taken out first: the end of a plan may run Python.
  std::unordered_multimap<std::uint64_t, Entry> entries;
  entries.swap(entries_);
  oldest_.clear();
  Reference objects = Reference::Stolen(PyDict_New());
  std::swap(objects, objects_);
  ++epoch_;
}

PyObject* FastCall::Run(const Taken& taken, PyObject* const* arguments, TensorView* views) {
  const int out_idx = signature_.out;
  Reference out = Reference::Borrowed(arguments[out_idx]);
  TensorView* out_view = &views[out_idx];
  if (arguments[out_idx] == Py_None) {
    // The first tensor, which is never optional, says where.
    out = Allocate(taken.allocation, views[0].device, out_view);
    if (!out) return nullptr;
  }
  const int num_tensors = static_cast<int>(signature_.plan_order.size());
  if (taken.launch == nullptr) {
    std::array<PyObject*, kMaxTensors> tensors;
    for (int i = 0; i < num_tensors; ++i) {
      const int position = signature_.plan_order[i];
      tensors[i] = position == out_idx ? out.get() : arguments[position];
    }
    const Reference nothing = Reference::Stolen(PyObject_Vectorcall(
        taken.plan.get(), tensors.data(), static_cast<std::size_t>(num_tensors), nullptr));
    return nothing ? out.Release() : nullptr;
  }
  void* stream = nullptr;
  const TensorDevice& device = views[0].device;
  if (api_.current_work_stream(device.type, device.id, &stream) != 0) return nullptr;
  std::array<void*, kMaxTensors> addresses;
  for (int i = 0; i < num_tensors; ++i) {
    const int position = signature_.plan_order[i];
    const bool is_absent = position != out_idx && arguments[position] == Py_None;
    addresses[i] = is_absent ? nullptr : views[position].address();
  }
  Reference workspace;  // until it is queued; then the allocator reuses it in the stream's order
  TensorView workspace_view{};
  if (taken.launch->workspace_bytes != 0) {
    workspace = Reference::Stolen(PyObject_CallFunction(
        workspace_.get(), "KO", static_cast<unsigned long long>(taken.launch->workspace_bytes),
        arguments[0]));
    if (!workspace || api_.view_from_py_object(workspace.get(), &workspace_view) != 0) {
      return nullptr;
    }
  }
  const int result =
      taken.launch->launch(taken.launch, addresses.data(), workspace_view.data, stream);
  return result == 0 ? out.Release() : nullptr;
}

Reference FastCall::Allocate(const Allocation& allocation, const TensorDevice& device,
                             TensorView* view) {
  PyObject* empty_strided = device.type == kCpu ? torch_.empty_strided_cpu.get() : nullptr;
  if (device.type == kCuda && torch_.current_cuda_device) {
    // It allocates on the current device, where nothing of this call may lie.
    const long current = CallForInt(torch_.current_cuda_device.get());
    if (current < 0) return Reference();
    if (current == device.id) empty_strided = torch_.empty_strided_cuda.get();
  }
  const long num_modes = CallForInt(torch_.num_function_modes.get());
  if (num_modes < 0) return Reference();
  // A torch function mode expects to see torch.empty.
  if (empty_strided != nullptr && num_modes == 0) {
    PyObject* const arguments[] = {allocation.shape.get(), allocation.strides.get(),
                                   allocation.dtype.get()};
    Reference out =
        Reference::Stolen(PyObject_Vectorcall(empty_strided, arguments, 3, nullptr));
    if (!out || api_.view_from_py_object(out.get(), view) != 0) return Reference();
    return out;
  }
  const Reference keywords = Reference::Stolen(Py_BuildValue("(ss)", "dtype", "device"));
  if (!keywords) return Reference();
  PyObject* const arguments[] = {allocation.shape.get(), allocation.dtype.get(),
                                 allocation.device.get()};
  Reference out = Reference::Stolen(
      PyObject_Vectorcall(torch_.empty.get(), arguments, 1, keywords.get()));
  if (!out || api_.view_from_py_object(out.get(), view) != 0) return Reference();
  return out;
}

PyObject* FastCall::Slow(PyObject* const* arguments, Py_ssize_t num_arguments) {
  ++num_slow_;
  return PyObject_Vectorcall(slow_.get(), arguments, static_cast<std::size_t>(num_arguments),
                             nullptr);
}

int FastCall::Traverse(visitproc visit, void* argument) const {
  for (const Reference* reference :
       {&torch_.tensor, &torch_.parameter, &torch_.is_grad_enabled, &torch_.requires_grad,
        &torch_.is_neg, &torch_.num_dispatch_modes, &torch_.num_function_modes, &torch_.empty,
        &torch_.empty_strided_cpu, &torch_.empty_strided_cuda,
        &torch_.current_cuda_device, &torch_.forward_ad, &make_, &slow_, &state_, &workspace_,
        &objects_}) {
    if (!*reference) continue;
    if (const int stop = visit(reference->get(), argument)) return stop;
  }
  for (const auto& [hash, entry] : entries_) {
    for (const Reference* reference :
         {&entry.plan, &entry.capsule, &entry.allocation.shape, &entry.allocation.strides,
          &entry.allocation.dtype, &entry.allocation.device}) {
      if (!*reference) continue;
      if (const int stop = visit(reference->get(), argument)) return stop;
    }
  }
  return 0;
}

}  // namespace stoneware::call
