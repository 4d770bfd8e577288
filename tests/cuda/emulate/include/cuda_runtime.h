// The calls of the CUDA runtime that launchers make. All of them may be made while a graph is
// captured; what they enqueue is done when they return, or then when it is replayed.
#pragma once

#include <cstdlib>
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
// The GPU that this is: of capability 8.0, or 9.0 where the variable below or that of the
// environment is set.
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
namespace emulate {
inline bool hopper = false;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrComputeCapabilityMinor                  ? 0
           : emulate::hopper || std::getenv("HETERPS_EMULATED_HOPPER") ? 9
                                                                       : 8;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* at, int byte, size_t size, cudaStream_t) {
  emulate::enqueue([=] { std::memset(at, byte, size); });
  return cudaSuccess;
}
