// float16 by the compiler's own, and not by that of the CPU twins.
#pragma once

struct __half {
  _Float16 number;

  __half() = default;
  explicit __half(float value) : number(static_cast<_Float16>(value)) {}
  explicit operator float() const { return static_cast<float>(number); }
};
