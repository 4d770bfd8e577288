// What the bindings of feed-forward networks of groups share.
#pragma once

#include "arrays.h"
#include "heterps/grouped_ffn.h"

namespace heterps {

inline Activation activation_of(int number) {
  if (number < 0 || number > static_cast<int>(Activation::kSwiglu)) {
    throw nb::value_error("activation: expected 0 to 3");
  }
  return static_cast<Activation>(number);
}

// Of so many rows of width `dim`; the weights are still to be checked against it.
inline FfnShape ffn_shape_of(int64_t rows, int64_t dim, const Input& w1, const Input& w2,
                             int activation) {
  return {rows, size_of(w1, "w1", 0, 3), dim, size_of(w2, "w2", 1, 3), activation_of(activation)};
}

}  // namespace heterps
