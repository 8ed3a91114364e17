// Conditions on Python objects, checked together without running Python.
//
// A module whose call was replaced by one kernel may use it only while its submodules, parameters
// and hooks are those of the proof. In Python these checks take longer than the call itself.

#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace stoneware::call {

namespace nb = nanobind;

class Guard {
 public:
  // dict.get(key) is value; None also stands for a missing key.
  struct Item {
    nb::object dict, key, value;
  };
  // type(object) is type.
  struct Kind {
    nb::object object, type;
  };
  // getattr(owner, name) is value.
  struct Attribute {
    nb::object owner, name, value;
  };
  // tensor.data_ptr() == address.
  struct Address {
    nb::object tensor;
    std::uint64_t address;
  };

  // `empty`: dicts that have no item.
  Guard(std::vector<Item> items, std::vector<nb::object> empty, std::vector<Kind> kinds,
        std::vector<Attribute> attributes, std::vector<Address> addresses);

  // Whether every condition holds. An object that raises an exception does not fulfil its own.
  bool Holds() const;

  int Traverse(visitproc visit, void* arg) const;
  // Forgets the conditions; nothing holds any more.
  void Clear();

 private:
  bool is_clear_ = false;
  std::vector<Item> items_;
  std::vector<nb::object> empty_;
  std::vector<Kind> kinds_;
  std::vector<Attribute> attributes_;
  std::vector<Address> addresses_;
  nb::object data_ptr_;  // the name of the method
};

}  // namespace stoneware::call
