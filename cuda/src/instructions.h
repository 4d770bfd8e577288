// Which instruction set a function is compiled for, and which this processor has.
#pragma once

// The name of a function that is compiled once for each: CMake gives HETERPS_INSTRUCTIONS.
#define HETERPS_JOINED(name, set) name##_##set
#define HETERPS_JOINED_OF(name, set) HETERPS_JOINED(name, set)
#define HETERPS_NAMED(name) HETERPS_JOINED_OF(name, HETERPS_INSTRUCTIONS)

// Of functions so named, which do the same, the one for this processor.
#ifdef HETERPS_X86_KERNELS
#define HETERPS_OF_THIS_CPU(name) heterps::of_this_cpu(name##_portable, name##_avx2, name##_avx512)

namespace heterps {

template <typename Function>
Function* of_this_cpu(Function* portable, Function* avx2, Function* avx512) {
  static const bool has_avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx512) return avx512;
  return has_avx2 ? avx2 : portable;
}

}  // namespace heterps
#else
#define HETERPS_OF_THIS_CPU(name) name##_portable
#endif
