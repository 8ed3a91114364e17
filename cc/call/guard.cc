#include "cc/call/guard.h"

#include <utility>

namespace stoneware::call {
namespace {

bool IsItem(const Guard::Item& item) {
  PyObject* value = PyDict_GetItemWithError(item.dict.ptr(), item.key.ptr());
  return value == item.value.ptr() || (value == nullptr && item.value.is_none());
}

bool IsAttribute(const Guard::Attribute& attribute) {
  const nb::object value = nb::steal(PyObject_GetAttr(attribute.owner.ptr(), attribute.name.ptr()));
  return value.is(attribute.value);
}

bool IsAt(const Guard::Address& address, PyObject* data_ptr) {
  PyObject* const tensor = address.tensor.ptr();
  const nb::object current = nb::steal(PyObject_VectorcallMethod(data_ptr, &tensor, 1, nullptr));
  return current && PyLong_AsUnsignedLongLong(current.ptr()) == address.address;
}

}  // namespace

Guard::Guard(std::vector<Item> items, std::vector<nb::object> empty, std::vector<Kind> kinds,
             std::vector<Attribute> attributes, std::vector<Address> addresses)
    : items_(std::move(items)),
      empty_(std::move(empty)),
      kinds_(std::move(kinds)),
      attributes_(std::move(attributes)),
      addresses_(std::move(addresses)),
      data_ptr_(nb::str("data_ptr")) {}

bool Guard::Holds() const {
  if (is_clear_) return false;
  for (const nb::object& dict : empty_) {
    if (PyDict_Size(dict.ptr()) != 0) return false;
  }
  for (const Kind& kind : kinds_) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(kind.object.ptr())) != kind.type.ptr()) return false;
  }
  bool holds = true;
  for (const Item& item : items_) holds = holds && IsItem(item);
  for (const Attribute& attribute : attributes_) holds = holds && IsAttribute(attribute);
  for (const Address& address : addresses_) holds = holds && IsAt(address, data_ptr_.ptr());
  if (!holds) PyErr_Clear();
  return holds;
}

int Guard::Traverse(visitproc visit, void* arg) const {
  for (const Item& item : items_) {
    Py_VISIT(item.dict.ptr());
    Py_VISIT(item.key.ptr());
    Py_VISIT(item.value.ptr());
  }
  for (const nb::object& dict : empty_) Py_VISIT(dict.ptr());
  for (const Kind& kind : kinds_) {
    Py_VISIT(kind.object.ptr());
    Py_VISIT(kind.type.ptr());
  }
  for (const Attribute& attribute : attributes_) {
    Py_VISIT(attribute.owner.ptr());
    Py_VISIT(attribute.name.ptr());
    Py_VISIT(attribute.value.ptr());
  }
  for (const Address& address : addresses_) Py_VISIT(address.tensor.ptr());
  return 0;
}

void Guard::Clear() {
  // Moved out first: the end of an object may run Python, which may ask this guard.
  is_clear_ = true;
  const auto items = std::exchange(items_, {});
  const auto empty = std::exchange(empty_, {});
  const auto kinds = std::exchange(kinds_, {});
  const auto attributes = std::exchange(attributes_, {});
  const auto addresses = std::exchange(addresses_, {});
}

}  // namespace stoneware::call
