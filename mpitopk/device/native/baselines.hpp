// What the benchmarks compare with: the floors of memory, and selection as others have it.
#pragma once

#include <atomic>
#include <numeric>

#include "elementwise.hpp"

namespace mpitopk {

struct ReadFloor {
  template <Isa>
  MPITOPK_INLINE static std::uint32_t run(const float* x, size_t size) {
    std::uint32_t most = 0;
    for (size_t i = 0; i < size; ++i) most = std::max(most, key_of(x[i]));
    return most;
  }
};

struct AddFloor {
  template <Isa>
  MPITOPK_INLINE static void run(const float* gradient, float* residual, size_t size) {
    for (size_t i = 0; i < size; ++i) residual[i] += gradient[i];
  }
};

inline void nth_element_topk(const float* x, size_t size, size_t k, Index* indices, float* values) {
  std::vector<Index> order(size);
  std::iota(order.begin(), order.end(), Index{0});
  const auto first = [x](Index a, Index b) {
    const std::uint32_t p = key_of(x[a]);
    const std::uint32_t q = key_of(x[b]);
    return p > q || (p == q && a < b);
  };
  std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k), order.end(), first);
  std::sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k));
  for (size_t i = 0; i < k; ++i) {
    indices[i] = order[i];
    values[i] = x[order[i]];
  }
}

// Two bits a pass, over all entries, as torch.topk did for one block of a GPU until 2021. One thread stands for
// that block: what matters is that the passes are many and that nobody helps.
inline void radix_topk(const float* x, size_t size, size_t k, Index* indices, float* values) {
  std::uint32_t found = 0;
  std::uint32_t known = 0;
  size_t wanted = k;
  for (int shift = 30; shift >= 0; shift -= 2) {
    size_t counts[4] = {};
    for (size_t i = 0; i < size; ++i) {
      const std::uint32_t key = key_of(x[i]);
      if ((key & known) == found) ++counts[key >> shift & 3];
    }
    std::uint32_t digit = 3;
    for (; wanted > counts[digit]; --digit) wanted -= counts[digit];
    found |= digit << shift;
    known |= 3u << shift;
  }
  for (size_t i = 0, at = 0; at < k; ++i) {
    const std::uint32_t key = key_of(x[i]);
    if (key > found || (key == found && wanted > 0)) {
      wanted -= key == found;
      indices[at] = static_cast<Index>(i);
      values[at++] = x[i];
    }
  }
}

}  // namespace mpitopk
