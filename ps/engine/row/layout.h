// How a row lies in memory: segments of columns, each under an optimizer of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bindings/platform.h"
#include "row/half.h"
#include "row/initializer.h"
#include "row/optimizer.h"

namespace heterps::ps {

struct Segment {
  size_t dim = 0;
  Optimizer optimizer;
  Initializer initializer;
  double lazy = 0;  // held from this score on; 0: always

  size_t column = 0;      // of the first of its values in a row of `dim`
  size_t weights_at = 0;  // bytes from the row's beginning
  size_t state_at = 0;
  size_t state_width = 0;  // floats
};

// A row is [weights and state of each segment that is always held][the same of lazy ones], so a
// narrow row, which lacks the lazy ones, is the beginning of a full row.
class Layout {
 public:
  Layout(std::vector<Segment> segments, Dtype dtype, bool stochastic);

  const std::vector<Segment>& segments() const { return segments_; }
  size_t dim() const { return dim_; }
  Dtype dtype() const { return dtype_; }
  bool has_lazy() const { return has_lazy_; }
  double lazy_from() const { return lazy_from_; }
  size_t bytes(bool full) const { return full ? full_bytes_ : narrow_bytes_; }
  bool plain() const { return plain_; }  // weights are one run of float32 at the beginning

  void Init(uint64_t key, bool full, char* row) const;
  // Gives a narrow row, copied to the place of a full one, its lazy segments.
  void Widen(uint64_t key, char* row) const;
  // `dim` floats of any alignment. What a narrow row lacks reads zero.
  void Read(const char* row, bool full, void* out) const {
    if (plain_) {
      CopyRow(out, row, dim_ * sizeof(float));
    } else {
      ReadSegments(row, full, out);
    }
  }
  // What a key without a row reads.
  void Fill(uint64_t key, bool zeros, void* out) const;
  double Norm(const char* row, bool full) const;

  // One gradient step on `n` distinct rows; grads[i] has `dim` floats of any alignment.
  void Apply(char* const* rows, const void* const* grads, size_t n, bool full, float rate,
             uint64_t nonce) const;
  enum class Write { kAdd, kAssign };
  void Put(char* row, const void* values, bool full, Write how, uint64_t nonce) const;

 private:
  void ReadSegments(const char* row, bool full, void* out) const;
  // Writes a segment's weights, rounded as the table rounds.
  void Store(const Segment& segment, const float* values, uint64_t nonce, char* row) const;
  void InitSegment(const Segment& segment, uint64_t key, char* row) const;
  void ApplySegment(const Segment& segment, char* const* rows, const void* const* grads, size_t n,
                    float rate, uint64_t nonce) const;

  std::vector<Segment> segments_;
  Dtype dtype_;
  bool stochastic_;
  bool has_lazy_ = false;
  bool plain_ = false;
  double lazy_from_ = 0;
  size_t dim_ = 0;
  size_t narrow_bytes_ = 0;
  size_t full_bytes_ = 0;
};

}  // namespace heterps::ps
