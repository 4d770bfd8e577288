#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace heterps {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

}  // namespace heterps
