#include "cc/call/fast_call.h"

#include <algorithm>

namespace stoneware::call {
namespace {

// Word 0 of a tensor that is absent; present ones have their rank plus one in the upper half.
constexpr std::uint64_t kAbsent = 0;

std::uint64_t Word(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

// Of a function that returns an int; -1 with an exception.
long CallForInt(const NativeFunction& function) {
  const Reference number = function();
  return number ? PyLong_AsLong(number.get()) : -1;
}

// 1, 0, or -1 with an exception, of a new reference or nullptr with an exception.
int IsTrue(Reference answer) { return answer ? PyObject_IsTrue(answer.get()) : -1; }

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
                   Reference make, Reference slow, Reference state, Reference epoch,
                   Reference workspace, std::size_t max_plans)
    : signature_(std::move(signature)),
      torch_(std::move(torch)),
      api_(api),
      make_(std::move(make)),
      slow_(std::move(slow)),
      state_(std::move(state)),
      epoch_(std::move(epoch)),
      workspace_(std::move(workspace)),
      get_requires_grad_(reinterpret_cast<descrgetfunc>(
          PyType_GetSlot(Py_TYPE(torch_.requires_grad.get()), Py_tp_descr_get))),
      current_level_(Reference::Stolen(PyUnicode_InternFromString("_current_level"))),
      max_plans_(max_plans),
      objects_(Reference::Stolen(PyDict_New())) {}

PyObject* FastCall::Call(PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (!CheckNumber(num_arguments)) return nullptr;
  std::array<TensorView, kMaxTensors> views;
  Key key;
  if (!Read(arguments, views.data(), &key) || IsUnusual(arguments, views.data())) {
    // What could not be read says so in `slow`, in words of ours.
    PyErr_Clear();
    ++num_slow_;
    return PyObject_Vectorcall(slow_.get(), arguments, static_cast<std::size_t>(num_arguments),
                               nullptr);
  }
  Taken taken;
  if (!TakePlan(arguments, &key, &taken)) return nullptr;
  num_hits_ += !taken.is_new;
  return Run(taken, arguments, views.data());
}

PyObject* FastCall::Plan(PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (!CheckNumber(num_arguments)) return nullptr;
  std::array<TensorView, kMaxTensors> views;
  Key key;
  Taken taken;
  bool has_plan;
  if (Read(arguments, views.data(), &key)) {
    has_plan = TakePlan(arguments, &key, &taken);
  } else {
    PyErr_Clear();
    bool is_kept;
    has_plan = Make(arguments, &taken, &is_kept);
  }
  return has_plan ? taken.plan.Release() : nullptr;
}

bool FastCall::CheckNumber(Py_ssize_t num_arguments) const {
  const int expected = signature_.num_tensors + signature_.num_objects;
  if (num_arguments == expected) return true;
  PyErr_Format(PyExc_TypeError, "a call must have %d arguments, but has %zd; pass each of them",
               expected, num_arguments);
  return false;
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
    if (type != torch_.tensor.get() && type != torch_.parameter.get()) return true;
    // Memory of a negated view holds the negative of its elements, which neither its strides nor
    // DLPack tell. torch negates no fp8, so nothing could read such a view of it.
    if (!views[i].dtype.is_fp8() && IsTrue(torch_.is_neg.Of(tensor)) != 0) return true;
  }
  return NeedsGradient(arguments, views);
}

bool FastCall::NeedsGradient(PyObject* const* arguments, const TensorView* views) const {
  const int is_enabled = IsTrue(torch_.is_grad_enabled());
  if (is_enabled <= 0) return is_enabled < 0;
  for (int i = 0; i < signature_.num_tensors; ++i) {
    if (arguments[i] == Py_None || views[i].dtype.is_integer()) continue;
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

bool FastCall::TakePlan(PyObject* const* arguments, Key* key, Taken* taken) {
  const unsigned long long epoch = PyLong_AsUnsignedLongLong(PyList_GetItem(epoch_.get(), 0));
  if (PyErr_Occurred() != nullptr) return false;
  key->Add(epoch);
  // Kept until the end of the look-up: its address is part of the key.
  const Reference state = Reference::Stolen(PyObject_CallNoArgs(state_.get()));
  if (!state) return false;
  key->first_object = key->size;
  for (int i = 0; i < signature_.num_objects; ++i) {
    key->Add(Word(arguments[signature_.num_tensors + i]));
  }
  key->Add(Word(state.get()));

  const Entry* entry = Find(*key);
  bool has_key = true;
  if (entry == nullptr) {
    // An object may be equal to one that is known without being it.
    has_key = MakeCanonical(arguments, state.get(), key, /*adds=*/false);
    if (has_key) entry = Find(*key);
    PyErr_Clear();  // an object that cannot be hashed; the checks say which
  }
  if (entry != nullptr) {
    taken->Take(*entry);
    return true;
  }
  bool is_kept;
  if (!Make(arguments, taken, &is_kept)) return false;
  if (is_kept && has_key) {
    if (!MakeCanonical(arguments, state.get(), key, /*adds=*/true)) return false;
    Insert(*key, *taken);
  }
  return true;
}

const FastCall::Entry* FastCall::Find(const Key& key) const {
  const auto [first, last] = entries_.equal_range(key.Hash());
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
    PyObject* object = i < signature_.num_objects ? arguments[signature_.num_tensors + i] : state;
    PyObject* known = PyDict_GetItemWithError(objects.get(), object);
    if (known == nullptr && PyErr_Occurred()) return false;
    if (known == nullptr && adds && PyDict_SetItem(objects.get(), object, object) != 0) {
      return false;
    }
    key->words[key->first_object + i] = Word(known != nullptr ? known : object);
  }
  return true;
}

bool FastCall::Make(PyObject* const* arguments, Taken* taken, bool* is_kept) {
  ++num_made_;
  taken->is_new = true;
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
  const int kept = PyObject_IsTrue(PyTuple_GetItem(made.get(), 1));
  *is_kept = kept > 0;
  return kept >= 0;
}

void FastCall::Insert(const Key& key, const Taken& taken) {
  if (Find(key) != nullptr) return;  // another thread was faster
  Entry entry;
  entry.words.assign(key.words.begin(), key.words.begin() + key.size);
  entry.hash = key.Hash();
  entry.number = num_entered_++;
  entry.plan = Reference::Borrowed(taken.plan.get());
  entry.capsule = Reference::Borrowed(taken.capsule.get());
  entry.launch = taken.launch;
  entry.allocation = {Reference::Borrowed(taken.allocation.shape.get()),
                      Reference::Borrowed(taken.allocation.strides.get()),
                      Reference::Borrowed(taken.allocation.dtype.get()),
                      Reference::Borrowed(taken.allocation.device.get())};
  for (int i = key.first_object; i < key.size; ++i) {
    auto* object = reinterpret_cast<PyObject*>(key.words[i]);
    entry.objects.push_back(Reference::Borrowed(object));
    ++num_uses_[object];
  }
  oldest_.emplace_back(entry.hash, entry.number);
  entries_.emplace(entry.hash, std::move(entry));

  // Ended last, when the table is whole again: the end of a plan may run Python, and so may the
  // comparison of objects.
  std::vector<Entry> gone;
  std::vector<PyObject*> unused;
  while (entries_.size() > max_plans_) Evict(&gone, &unused);
  for (PyObject* object : unused) {
    if (PyDict_DelItem(objects_.get(), object) != 0) PyErr_Clear();
  }
}

void FastCall::Evict(std::vector<Entry>* entries, std::vector<PyObject*>* objects) {
  const auto [hash, number] = oldest_.front();
  oldest_.pop_front();
  const auto [first, last] = entries_.equal_range(hash);
  for (auto found = first; found != last; ++found) {
    if (found->second.number != number) continue;
    for (const Reference& object : found->second.objects) {
      const auto uses = num_uses_.find(object.get());
      if (--uses->second != 0) continue;
      num_uses_.erase(uses);
      objects->push_back(object.get());  // lives as long as the entry
    }
    entries->push_back(std::move(found->second));
    entries_.erase(found);
    return;
  }
}

void FastCall::Clear() {
  // Taken out first: the end of a plan may run Python.
  std::unordered_multimap<std::uint64_t, Entry> entries;
  entries.swap(entries_);
  oldest_.clear();
  num_uses_.clear();
  Reference objects = Reference::Stolen(PyDict_New());
  std::swap(objects, objects_);
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
    const long current = CallForInt(torch_.current_cuda_device);
    if (current < 0) return Reference();
    if (current == device.id) empty_strided = torch_.empty_strided_cuda.get();
  }
  const long num_modes = CallForInt(torch_.num_function_modes);
  if (num_modes < 0) return Reference();
  // A torch function mode expects to see torch.empty.
  if (empty_strided != nullptr && num_modes == 0) {
    PyObject* const arguments[] = {allocation.shape.get(), allocation.strides.get(),
                                   allocation.dtype.get()};
    Reference out = Reference::Stolen(PyObject_Vectorcall(empty_strided, arguments, 3, nullptr));
    if (!out || api_.view_from_py_object(out.get(), view) != 0) return Reference();
    return out;
  }
  const Reference keywords = Reference::Stolen(Py_BuildValue("(ss)", "dtype", "device"));
  if (!keywords) return Reference();
  PyObject* const arguments[] = {allocation.shape.get(), allocation.dtype.get(),
                                 allocation.device.get()};
  Reference out =
      Reference::Stolen(PyObject_Vectorcall(torch_.empty.get(), arguments, 1, keywords.get()));
  if (!out || api_.view_from_py_object(out.get(), view) != 0) return Reference();
  return out;
}

int FastCall::Traverse(visitproc visit, void* argument) const {
  for (const Reference* reference :
       {&torch_.tensor, &torch_.parameter, &torch_.requires_grad, &torch_.empty,
        &torch_.empty_strided_cpu, &torch_.empty_strided_cuda, &torch_.forward_ad, &make_, &slow_,
        &state_, &epoch_, &workspace_, &objects_}) {
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
    for (const Reference& object : entry.objects) {
      if (const int stop = visit(object.get(), argument)) return stop;
    }
  }
  return 0;
}

}  // namespace stoneware::call
