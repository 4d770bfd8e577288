// Arrays of the caller's, for the length of a call and no longer.
//
// An export by DLPack costs more than many a kernel: Python code, a capsule, an owner on the heap.
// Types that offer DLPack's C functions beside it (torch's tensors from 2.10 on) are asked by
// these, which fill in a view and own nothing; all others are exported.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace nb = nanobind;

namespace heterps {

// What an op reads, or writes.
template <bool kWritten>
class Borrowed {
 public:
  using Exported = std::conditional_t<kWritten, nb::ndarray<>, nb::ndarray<nb::ro>>;

  Borrowed() = default;
  explicit Borrowed(const nb::dlpack::dltensor& view) : view_(view) {}
  explicit Borrowed(const Exported& exported) : exported_(exported) {
    view_.data = const_cast<void*>(static_cast<const void*>(exported.data()));
    view_.device = {exported.device_type(), exported.device_id()};
    view_.ndim = static_cast<int32_t>(exported.ndim());
    view_.dtype = exported.dtype();
    view_.shape = const_cast<int64_t*>(exported.shape_ptr());
    view_.strides = const_cast<int64_t*>(exported.stride_ptr());
  }

  int device_type() const { return view_.device.device_type; }
  nb::dlpack::dtype dtype() const { return view_.dtype; }
  size_t ndim() const { return static_cast<size_t>(view_.ndim); }
  int64_t shape(size_t axis) const { return view_.shape[axis]; }
  int64_t stride(size_t axis) const { return view_.strides[axis]; }
  int64_t size() const {
    int64_t elements = 1;
    for (size_t axis = 0; axis < ndim(); ++axis) elements *= shape(axis);
    return elements;
  }
  void* data() const { return static_cast<char*>(view_.data) + view_.byte_offset; }

 private:
  nb::dlpack::dltensor view_{};
  Exported exported_;  // what `view_` is of, unless it is borrowed
};

// The first part of DLPack 1.3's DLPackExchangeAPI, which is found on the type.
struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* older;
  void* allocate;
  void* to_managed;
  void* from_managed;
  int (*view)(void* object, nb::dlpack::dltensor* out);
};

// How to look at objects of a type; null where it does not say. The last answer is kept: the GIL is
// held, and nearly every array is a torch.Tensor.
inline decltype(ExchangeApi::view) view_of(PyTypeObject* type) {
  static PyTypeObject* last = nullptr;
  static decltype(ExchangeApi::view) view = nullptr;
  if (type == last) return view;
  auto* object = reinterpret_cast<PyObject*>(type);
  decltype(ExchangeApi::view) found = nullptr;
  PyObject* capsule = PyObject_GetAttrString(object, "__dlpack_c_exchange_api__");
  if (capsule != nullptr) {
    auto* api = static_cast<ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    while (api != nullptr && api->major > 1) api = api->older;
    if (api != nullptr && api->major == 1) found = api->view;
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  Py_INCREF(object);  // so that no other comes to lie there
  Py_XDECREF(reinterpret_cast<PyObject*>(last));
  last = type;
  view = found;
  return view;
}

}  // namespace heterps

namespace nanobind::detail {

template <bool kWritten>
struct type_caster<heterps::Borrowed<kWritten>> {
  NB_TYPE_CASTER(heterps::Borrowed<kWritten>, const_name("ArrayLike"))

  bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) noexcept {
    const auto view = heterps::view_of(Py_TYPE(source.ptr()));
    dlpack::dltensor tensor{};
    if (view != nullptr && view(source.ptr(), &tensor) == 0 && tensor.strides != nullptr) {
      value = heterps::Borrowed<kWritten>(tensor);
      return true;
    }
    PyErr_Clear();
    make_caster<typename heterps::Borrowed<kWritten>::Exported> exported;
    if (!exported.from_python(source, flags, cleanup) || !exported.value.is_valid()) return false;
    value = heterps::Borrowed<kWritten>(exported.value);
    return true;
  }
};

}  // namespace nanobind::detail
