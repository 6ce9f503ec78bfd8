// From the accumulator to the message, rounding on the way; what rounding loses stays behind.
#pragma once

#include <cstring>

#include "elementwise.hpp"

namespace mpitopk {

// A part of the buffer that is sent whole.
struct Dense {
  std::int64_t start, stop;
};

struct Round {
  template <Isa, class T, class W>
  MPITOPK_INLINE static void run(T* values, W* out, size_t size) {
    for (size_t i = 0; i < size; ++i) {
      out[i] = narrow<W>(values[i]);
      values[i] -= widen<T>(out[i]);
    }
  }
};

// `x` is zero at the indices. `values` is scratch afterwards.
template <class T, class W>
void pack(Pool& pool, Isa isa, T* x, const std::vector<Dense>& dense, const Index* indices, T* values,
          size_t k, Index* out_indices, W* out_values) {
  const auto round = [&](T* from, W* to, size_t size) {
    if constexpr (std::is_same_v<T, W>) {
      std::memcpy(to, from, size * sizeof(T));
      std::memset(from, 0, size * sizeof(T));
    } else {
      run_on<Round>(isa, from, to, size);
    }
  };
  for_parts(pool, k, [&](size_t first, size_t size) {
    if (out_indices != nullptr) std::memcpy(out_indices + first, indices + first, size * sizeof(Index));
    round(values + first, out_values + first, size);
    if constexpr (!std::is_same_v<T, W>) {
      for (size_t i = first; i < first + size; ++i) x[indices[i]] = values[i];
    }
  });
  W* to = out_values + k;
  for (const Dense& piece : dense) {
    const auto size = static_cast<size_t>(piece.stop - piece.start);
    for_parts(pool, size, [&](size_t first, size_t part) {
      round(x + static_cast<size_t>(piece.start) + first, to + first, part);
    });
    to += size;
  }
}

}  // namespace mpitopk
