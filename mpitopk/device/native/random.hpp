// k distinct random positions of n, from a key: the first k values of a keyed permutation, sorted.
#pragma once

#include <array>
#include <bit>
#include <numeric>

#include "buffer.hpp"
#include "isa.hpp"
#include "plan.hpp"

namespace mpitopk {

inline std::uint64_t splitmix64(std::uint64_t z) {
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// A bijection of 32 bits (Wellons's lowbias32).
MPITOPK_INLINE std::uint32_t mix(std::uint32_t v) {
  v = (v ^ (v >> 16)) * 0x7feb352du;
  v = (v ^ (v >> 15)) * 0x846ca68bu;
  return v ^ (v >> 16);
}

// A balanced Feistel network over an even number of bits, at least 8.
class Permutation {
 public:
  Permutation(std::uint64_t key, size_t size) {
    const int bits = std::max(8, static_cast<int>(std::bit_width(size - 1)));
    half_ = static_cast<std::uint32_t>((bits + 1) / 2);
    mask_ = (std::uint32_t{1} << half_) - 1;
    for (size_t r = 0; r < keys_.size(); ++r) {
      keys_[r] = static_cast<std::uint32_t>(splitmix64(splitmix64(key) + r));
    }
  }

  MPITOPK_INLINE std::uint32_t operator()(std::uint32_t x) const {
    std::uint32_t left = x >> half_;
    std::uint32_t right = x & mask_;
    for (const std::uint32_t key : keys_) {
      const std::uint32_t next = left ^ (mix(right ^ key) & mask_);
      left = right;
      right = next;
    }
    return (left << half_) | right;
  }

 private:
  std::array<std::uint32_t, 6> keys_;
  std::uint32_t half_;
  std::uint32_t mask_;
};

// Walk each x[i] along its cycle to the first position below `size`. The order is lost.
struct Walk {
  template <Isa>
  MPITOPK_INLINE static void run(const Permutation& permutation, size_t size, Index* x, size_t count) {
    while (count > 0) {
      for (size_t i = 0; i < count; ++i) x[i] = permutation(x[i]);
      size_t inside = 0;
      for (size_t i = 0; i < count; ++i) {
        const Index value = x[i];
        x[i] = x[inside];
        x[inside] = value;
        inside += value < size;
      }
      x += inside;
      count -= inside;
    }
  }
};

// Sort ascending, by digits of 11 bits; `spare` has room for as many.
inline void sort_indices(Index* x, Index* spare, size_t count, size_t size) {
  constexpr int digit = 11;
  Index* from = x;
  Index* to = spare;
  for (int shift = 0; shift < static_cast<int>(std::bit_width(size)); shift += digit) {
    std::array<size_t, (size_t{1} << digit) + 1> starts{};
    const auto bin = [shift](Index value) { return (value >> shift) & ((Index{1} << digit) - 1); };
    for (size_t i = 0; i < count; ++i) ++starts[bin(from[i]) + 1];
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    for (size_t i = 0; i < count; ++i) to[starts[bin(from[i])]++] = from[i];
    std::swap(from, to);
  }
  if (from != x) std::copy(from, from + count, x);
}

class RandomIndices {
 public:
  void run(Pool& pool, Isa isa, const Cut& cut, std::uint64_t key, Index* out) {
    Index* spare = spare_.reserve(cut.total);
    pool.each(pool.useful(cut.total), cut.groups.size(), [&](int, size_t g) {
      const Group& group = cut.groups[g];
      const Permutation permutation(key + g, group.size);
      Index* mine = out + group.offset;
      std::iota(mine, mine + group.count, Index{0});
      run_on<Walk>(isa, permutation, group.size, mine, group.count);
      sort_indices(mine, spare + group.offset, group.count, group.size);
      size_t before = 0;
      size_t i = 0;
      for (size_t s = group.first_span; s < group.last_span; ++s) {
        const Span& span = cut.spans[cut.sparse[s]];
        const size_t size = span.stop - span.start;
        for (; i < group.count && mine[i] < before + size; ++i) {
          mine[i] = static_cast<Index>(span.start + (mine[i] - before));
        }
        before += size;
      }
    });
  }

 private:
  Buffer<Index> spare_;
};

}  // namespace mpitopk
