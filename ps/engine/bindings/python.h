// Between Python objects and the engine: buffers used in place, arrays that own their memory.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "row/half.h"

namespace heterps::ps {

namespace nb = nanobind;

// A held view of a C-contiguous Python buffer.
class View {
 public:
  explicit View(nb::handle object, bool writable = false) {
    const int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) nb::raise_python_error();
  }
  View(View&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
  ~View() {
    if (view_.obj) PyBuffer_Release(&view_);
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  const char* data() const { return static_cast<const char*>(view_.buf); }
  char* writable() const { return static_cast<char*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }
  // Number of `item`-byte items.
  size_t Count(size_t item, const char* what) const {
    if (item == 0 || size() % item != 0) {
      throw std::invalid_argument(std::string(what) + ": " + std::to_string(size()) +
                                  " bytes are not a whole number of " + std::to_string(item) +
                                  "-byte items");
    }
    return size() / item;
  }
  void Expect(size_t bytes, const char* what) const {
    if (size() == bytes) return;
    throw std::invalid_argument(std::string(what) + ": " + std::to_string(size()) +
                                " bytes, expected " + std::to_string(bytes));
  }

 private:
  Py_buffer view_{};
};

using Floats = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

inline Floats NewFloats(size_t n, size_t dim) {
  float* data = new float[n * dim];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return Floats(data, {n, dim}, owner);
}

template <typename T>
nb::object ToArray(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

template <typename T>
nb::object ToArray(std::unique_ptr<T[]>&& values, size_t n) {
  T* data = values.release();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {n}, owner));
}

// bytes of `size` bytes beginning with `prefix`; the caller fills the rest through *body.
inline nb::bytes NewMessage(const View& prefix, size_t body_size, char** body) {
  PyObject* bytes =
      PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(prefix.size() + body_size));
  if (!bytes) nb::raise_python_error();
  char* data = PyBytes_AsString(bytes);
  std::memcpy(data, prefix.data(), prefix.size());
  *body = data + prefix.size();
  return nb::steal<nb::bytes>(bytes);
}

template <typename Enum>
Enum Lookup(const std::string& name, std::initializer_list<std::pair<const char*, Enum>> known,
            const char* what) {
  for (const auto& [text, value] : known) {
    if (name == text) return value;
  }
  throw std::invalid_argument(std::string("unknown ") + what + " '" + name + "'");
}

inline Dtype DtypeOf(const std::string& name) {
  return Lookup<Dtype>(name,
                       {{"", Dtype::kFloat32},
                        {"float32", Dtype::kFloat32},
                        {"float16", Dtype::kFloat16},
                        {"bfloat16", Dtype::kBfloat16},
                        {"int8", Dtype::kInt8}},
                       "dtype");
}

inline size_t CheckKeyBytes(size_t key_bytes) {
  if (key_bytes != 4 && key_bytes != 8)
    throw std::invalid_argument("keys of 4 or 8 bytes expected");
  return key_bytes;
}

void BindBags(nb::module_& m);
void BindBatch(nb::module_& m);
void BindMerge(nb::module_& m);
void BindPieces(nb::module_& m);
void BindTable(nb::module_& m);
void BindWindow(nb::module_& m);

}  // namespace heterps::ps
