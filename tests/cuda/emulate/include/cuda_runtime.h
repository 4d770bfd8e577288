// The calls of the CUDA runtime that launchers make. Everything is done when a call returns.
#pragma once

#include <cstring>

#include "device.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
using cudaStream_t = struct CUstream_st*;

namespace emulate {
inline cudaError_t last_error = cudaSuccess;
}

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = emulate::last_error;
  emulate::last_error = cudaSuccess;
  return error;
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid configuration argument";
}
inline cudaError_t cudaMemsetAsync(void* at, int byte, size_t size, cudaStream_t) {
  std::memset(at, byte, size);
  return cudaSuccess;
}
