// Operations on every entry by itself.
#pragma once

#include <atomic>

#include "pool.hpp"
#include "scan.hpp"

namespace mpitopk {

struct CheckFinite {
  template <Isa, class G>
  MPITOPK_INLINE static bool run(const G* x, size_t size) {
    Bits<G> most = 0;
    for (size_t i = 0; i < size; ++i) most = std::max(most, key_of(x[i]));
    return most < Format<G>::infinity;
  }
};

struct ZeroNonfinite {
  template <Isa, class G>
  MPITOPK_INLINE static size_t run(G* x, size_t size) {
    size_t bad = 0;
    for (size_t i = 0; i < size; ++i) {
      const bool finite = key_of(x[i]) < Format<G>::infinity;
      bad += !finite;
      x[i] = finite ? x[i] : G{};
    }
    return bad;
  }
};

struct Accumulate {
  template <Isa, class T, class G>
  MPITOPK_INLINE static bool run(const G* gradient, const T* residual, T* out, size_t size, T scale, T keep) {
    Bits<T> most = 0;
    for (size_t i = 0; i < size; ++i) {
      const T value = scale * widen<T>(gradient[i]);
      out[i] = residual == nullptr ? value : keep * residual[i] + value;
      most = std::max(most, key_of(out[i]));
    }
    return most < Format<T>::too_large;
  }
};

struct Divide {
  template <Isa, class T>
  MPITOPK_INLINE static bool run(T* x, size_t size, T divisor) {
    Bits<T> most = 0;
    for (size_t i = 0; i < size; ++i) {
      x[i] /= divisor;
      most = std::max(most, key_of(x[i]));
    }
    return most < Format<T>::infinity;
  }
};

// Sum of the squares, or of the numbers themselves, of each stretch of `stretch` entries: `lanes` sums of
// every lanes-th entry, added up by halves. The order is fixed, so that the sum is the same everywhere.
struct Sum {
  static constexpr size_t lanes = 256;
  static constexpr size_t stretch = 16 * lanes;

  template <Isa, class G>
  MPITOPK_INLINE static void run(const G* x, size_t size, double* out, bool squared) {
    for (size_t begin = 0; begin < size; begin += stretch, ++out) {
      const size_t end = std::min(size, begin + stretch);
      double sums[lanes] = {};
      for (size_t i = begin; i < end; i += lanes) {
        const size_t width = std::min(lanes, end - i);
        for (size_t j = 0; j < width; ++j) {
          const double value = widen<double>(x[i + j]);
          sums[j] += squared ? value * value : value;
        }
      }
      for (size_t half = lanes / 2; half > 0; half /= 2) {
        for (size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
      }
      *out = sums[0];
    }
  }
};

// Call f(first, size) for the parts of [0, size) of all threads, which begin at multiples of the grain.
template <class F>
void for_parts(Pool& pool, size_t size, F&& f, size_t grain = block) {
  const int use = pool.useful(size);
  pool.run(use, [&](int t) {
    const auto [first, last] = share(size, t, use, grain);
    f(first, last - first);
  });
}

// Whether f(first, size) is true of all parts.
template <class F>
bool all_parts(Pool& pool, size_t size, F&& f, size_t grain = block) {
  std::atomic<bool> all{true};
  auto part_of = [&](size_t first, size_t part) {
    if (!f(first, part)) all.store(false, std::memory_order_relaxed);
  };
  for_parts(pool, size, part_of, grain);
  return all.load();
}

}  // namespace mpitopk
