// stoneware.ops._call: what runs without Python: calls of ops that were made before, and checks of
// what these calls depend on. No CUDA call of its own.

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/call/fast_call.h"
#include "cc/call/guard.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace stoneware::call {
namespace {

// An attribute of torch, which must be a built-in function without arguments.
NativeFunction FunctionOf(nb::handle owner, const char* name) {
  NativeFunction function(nb::object(owner.attr(name)).ptr());
  if (function) return function;
  throw nb::attribute_error((std::string(name) +
                             " of torch must be a built-in function without "
                             "arguments, as in torch 2.10 and later; install another torch")
                                .c_str());
}

std::uint32_t Bits(const char* name, const std::vector<int>& positions, int num_tensors) {
  std::uint32_t bits = 0;
  for (const int position : positions) {
    if (position < 0 || position >= num_tensors) {
      throw std::invalid_argument(std::string(name) + " must hold positions of tensors, 0 to " +
                                  std::to_string(num_tensors - 1) + ", but holds " +
                                  std::to_string(position) + "; correct it");
    }
    bits |= std::uint32_t{1} << position;
  }
  return bits;
}

void Init(FastCall* self, nb::object torch, nb::object make, nb::object slow, nb::object state,
          nb::list epoch, nb::object enter_thread, int num_tensors, int num_objects,
          const std::vector<int>& outs, const std::vector<int>& optional,
          const std::vector<int>& aligned, const std::vector<int>& plan_order,
          std::size_t max_plans, std::size_t num_results, bool is_layer, bool is_cast) {
  if (num_tensors < 1 || num_tensors > kMaxTensors || num_objects < 0 ||
      num_objects > kMaxObjects) {
    throw std::invalid_argument("an op must have 1 to " + std::to_string(kMaxTensors) +
                                " tensors and at most " + std::to_string(kMaxObjects) +
                                " other arguments, but has " + std::to_string(num_tensors) +
                                " and " + std::to_string(num_objects) + "; declare fewer");
  }
  Signature signature;
  signature.num_tensors = num_tensors;
  signature.num_objects = num_objects;
  signature.outs = outs;
  signature.num_results = num_results;
  signature.is_layer = is_layer;
  signature.is_cast = is_cast;
  signature.optional = Bits("optional", optional, num_tensors);
  signature.aligned = Bits("aligned", aligned, num_tensors);
  Bits("plan_order", plan_order, num_tensors);
  const std::uint32_t out_bits = Bits("outs", outs, num_tensors);
  if (outs.empty() || (out_bits & 1) != 0 || (signature.optional & 1) != 0) {
    throw std::invalid_argument(
        "tensor 0 must be an input and never None (its device is the call's), and there must be an "
        "output, but outs or optional say otherwise; put such an input first");
  }
  if (num_results < 1 || num_results > outs.size()) {
    throw std::invalid_argument("num_results must be 1 to " + std::to_string(outs.size()) +
                                ", the number of outs, but is " + std::to_string(num_results) +
                                "; correct it");
  }
  if (plan_order.size() > kMaxTensors) {
    throw std::invalid_argument("plan_order must have at most " + std::to_string(kMaxTensors) +
                                " positions, but has " + std::to_string(plan_order.size()) +
                                "; name each tensor once");
  }
  signature.plan_order = plan_order;

  const nb::object tensor = torch.attr("Tensor");
  const ExchangeApi* api = ExchangeApi::Find(tensor.ptr());
  if (api == nullptr) {
    throw nb::attribute_error(
        "torch.Tensor must have the DLPack exchange API of major version 1, but has none; install "
        "torch 2.10 or later");
  }
  const nb::object native = torch.attr("_C");
  TorchFunctions functions;
  functions.tensor = tensor;
  functions.parameter = torch.attr("nn").attr("Parameter");
  functions.is_grad_enabled = FunctionOf(native, "is_grad_enabled");
  functions.requires_grad = tensor.attr("requires_grad");
  if (PyType_GetSlot(Py_TYPE(functions.requires_grad.ptr()), Py_tp_descr_get) == nullptr) {
    throw nb::attribute_error(
        "torch.Tensor.requires_grad must be a descriptor, as that of torch "
        "2.10 and later is, but has no __get__; install another torch");
  }
  functions.is_neg = FunctionOf(tensor(), "is_neg");
  functions.num_dispatch_modes = FunctionOf(native, "_len_torch_dispatch_stack");
  functions.num_function_modes = FunctionOf(native, "_len_torch_function_stack");
  functions.has_transforms = native.attr("_are_functorch_transforms_active");
  functions.is_autocast_enabled = FunctionOf(native, "_is_any_autocast_enabled");
  functions.empty_strided = torch.attr("empty_strided");
  // What torch.compile's generated code allocates with: no parsing of arguments, no dispatcher.
  const nb::object guards =
      nb::getattr(nb::getattr(native, "_dynamo", nb::none()), "guards", nb::none());
  functions.empty_strided_cpu = nb::getattr(guards, "_empty_strided_cpu", nb::handle());
  functions.empty_strided_cuda = nb::getattr(guards, "_empty_strided_cuda", nb::handle());
  functions.uint8 = torch.attr("uint8");
  functions.current_cuda_device =
      NativeFunction(nb::object(nb::getattr(native, "_cuda_getDevice", nb::none())).ptr());
  functions.forward_ad = torch.attr("autograd").attr("forward_ad").attr("__dict__");
  new (self) FastCall(std::move(signature), std::move(functions), *api, make, slow, state, epoch,
                      enter_thread, max_plans);
}

template <PyObject* (FastCall::*method)(PyObject* const*, Py_ssize_t)>
PyObject* CallMethod(PyObject* self, PyObject* const* arguments, Py_ssize_t num_arguments) {
  try {
    return (nb::inst_ptr<FastCall>(self)->*method)(arguments, num_arguments);
  } catch (const std::exception& error) {  // std::bad_alloc
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

template <PyObject* (FastCall::*method)(PyObject* const*, Py_ssize_t)>
PyMethodDef Definition(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&CallMethod<method>)),
          METH_FASTCALL, nullptr};
}

PyMethodDef call_definition = Definition<&FastCall::Call>("call");
PyMethodDef plan_definition = Definition<&FastCall::Plan>("plan");

void InitGuard(Guard* self, const std::vector<std::tuple<nb::dict, nb::object, nb::object>>& items,
               const std::vector<nb::dict>& empty,
               const std::vector<std::tuple<nb::object, nb::object>>& kinds,
               const std::vector<std::tuple<nb::object, nb::str, nb::object>>& attributes,
               const std::vector<std::tuple<nb::object, std::uint64_t>>& addresses) {
  std::vector<Guard::Item> as_items;
  for (const auto& [dict, key, value] : items) as_items.push_back({dict, key, value});
  std::vector<Guard::Kind> as_kinds;
  for (const auto& [object, type] : kinds) as_kinds.push_back({object, type});
  std::vector<Guard::Attribute> as_attributes;
  for (const auto& [owner, name, value] : attributes) as_attributes.push_back({owner, name, value});
  std::vector<Guard::Address> as_addresses;
  for (const auto& [tensor, address] : addresses) as_addresses.push_back({tensor, address});
  new (self) Guard(std::move(as_items), {empty.begin(), empty.end()}, std::move(as_kinds),
                   std::move(as_attributes), std::move(as_addresses));
}

PyObject* Holds(PyObject* self, PyObject*) {
  return PyBool_FromLong(nb::inst_ptr<Guard>(self)->Holds());
}

PyMethodDef holds_definition = {"holds", &Holds, METH_NOARGS, nullptr};

// CPython's own bound function: calling it costs less than calling a method of nanobind's.
nb::object Bound(PyMethodDef* definition, nb::handle self, const std::string& type) {
  if (!nb::inst_ready(self)) {
    const std::string message =
        "a " + type + " must be made by " + type + "(...), not by __new__ alone";
    throw nb::type_error(message.c_str());
  }
  return nb::steal(PyCFunction_NewEx(definition, self.ptr(), nullptr));
}

// Py_VISIT takes the name `arg`.
template <class T>
int Traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<PyObject*>(Py_TYPE(self)));
  return nb::inst_ready(self) ? nb::inst_ptr<T>(self)->Traverse(visit, arg) : 0;
}

template <class T>
int Clear(PyObject* self) {
  // The garbage collector also clears an instance of which the constructor did not run.
  if (nb::inst_ready(self)) nb::inst_ptr<T>(self)->Clear();
  return 0;
}

template <class T>
PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&Traverse<T>)},
                       {Py_tp_clear, reinterpret_cast<void*>(&Clear<T>)},
                       {0, nullptr}};

}  // namespace
}  // namespace stoneware::call

NB_MODULE(_call, m) {
  using namespace stoneware::call;
  // Torch keeps what was registered with it until the process ends, and plans with that.
  nb::set_leak_warnings(false);
  m.doc() = "The plans of ops, and calls whose plan is known without Python.";
  nb::class_<FastCall>(m, "FastCall", nb::type_slots(slots<FastCall>),
                       "The calls of one op, and their plans.")
      .def("__init__", &Init, "torch"_a, nb::kw_only(), "make"_a, "slow"_a, "state"_a, "epoch"_a,
           "enter_thread"_a, "num_tensors"_a, "num_objects"_a, "outs"_a, "optional"_a, "aligned"_a,
           "plan_order"_a, "max_plans"_a, "num_results"_a = 1, "is_layer"_a = false,
           "is_cast"_a = false,
           "Args:\n"
           "  torch: the module.\n"
           "  make: make(*arguments) returns (plan, is_kept, device, outputs): a plan, whether it\n"
           "    holds for later calls, and where and what to allocate for outputs that are None:\n"
           "    (shape, strides, dtype) of each.\n"
           "  slow: slow(*arguments) is the whole call, for those that are unusual.\n"
           "  state: state() is an object that plans depend on too.\n"
           "  epoch: a list of one int, which changes when every plan must be made anew.\n"
           "  enter_thread: enter_thread() is called once in each thread, before torch's own\n"
           "    functions run on a GPU there.\n"
           "  num_tensors: the first arguments.\n"
           "  num_objects: the arguments after them.\n"
           "  outs: positions of the tensors that are allocated where they are None.\n"
           "  optional: positions of the tensors that may be None.\n"
           "  aligned: positions of the tensors whose plan depends on whether their address is a\n"
           "    multiple of 16 bytes.\n"
           "  plan_order: positions of the tensors in the order of a plan's arguments.\n"
           "  max_plans: how many the table holds; a full one is emptied.\n"
           "  num_results: how many of outs, the first, a call returns; the others are memory for\n"
           "    what is in between.\n"
           "  is_layer: whether calls that need a gradient are usual, and have the inputs that\n"
           "    require one in their key.\n"
           "  is_cast: whether the calls of a layer under autocast are usual; otherwise `slow` "
           "gets\n"
           "    them.\n\n"
           "Raises:\n"
           "  AttributeError: this torch lacks what is needed.\n"
           "  ValueError: a position or a number is out of range.")
      .def_prop_ro(
          "call", [](nb::handle self) { return Bound(&call_definition, self, "FastCall"); },
          "call(*tensors, *objects) returns the output, or a tuple of several.")
      .def_prop_ro(
          "plan", [](nb::handle self) { return Bound(&plan_definition, self, "FastCall"); },
          "plan(*tensors, *objects) returns the plan of a call, of whatever kind.")
      .def("clear", &FastCall::Clear, "Forgets every plan.")
      .def("__len__", &FastCall::size)
      .def_prop_ro("num_hits", &FastCall::num_hits, "Calls without Python whose plan was known.")
      .def_prop_ro("num_made", &FastCall::num_made, "Plans that were asked of `make`.")
      .def_prop_ro("num_slow", &FastCall::num_slow, "Calls that were unusual.");
  nb::class_<Guard>(m, "Guard", nb::type_slots(slots<Guard>),
                    "Conditions on Python objects, checked together.")
      .def("__init__", &InitGuard, nb::kw_only(), "items"_a, "empty"_a, "kinds"_a, "attributes"_a,
           "addresses"_a,
           "Args:\n"
           "  items: (dict, key, value): dict.get(key) is value.\n"
           "  empty: dicts that have no item.\n"
           "  kinds: (object, type): type(object) is type.\n"
           "  attributes: (owner, name, value): getattr(owner, name) is value.\n"
           "  addresses: (tensor, address): tensor.data_ptr() == address.")
      .def_prop_ro(
          "holds", [](nb::handle self) { return Bound(&holds_definition, self, "Guard"); },
          "holds() returns whether every condition holds; an object that raises an exception does "
          "not fulfil its own.");
}
