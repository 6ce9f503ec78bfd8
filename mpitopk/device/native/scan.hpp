// One streaming pass: accumulate, keep what may win, and notice what is not finite.
#pragma once

#include <array>
#include <bit>
#include <cstring>

#include "buffer.hpp"
#include "isa.hpp"
#include "kth.hpp"
#include "plan.hpp"
#include "types.hpp"

namespace mpitopk {

constexpr size_t block = 64;

// What one thread has found, ascending by index.
template <class T>
struct Found {
  Buffer<Index> indices;
  Buffer<T> values;
  size_t count = 0;
  bool finite = true;
  KthScratch<T> scratch;

  void make_room() {
    indices.reserve(count + block, count);
    values.reserve(count + block, count);
  }
};

// Entries of magnitude `low` or more may win; those of `sure` or more most probably do, and are set to
// zero in the accumulator at once. Neither needs to be right: with too many candidates the smallest
// are dropped on the way, with too few the pass is repeated, and zeros written in vain are undone.
template <class T>
struct Limits {
  Bits<T> low = 0;
  Bits<T> sure = Format<T>::none;
};

// The accumulator is computed and written: out = residual + gradient.
template <class T, class G>
struct Fused {
  static constexpr bool writes = true;
  const G* gradient;
  const T* residual;
  T* out;
  bool streams;  // past the caches, where the buffer does not fit into them

  // Return where the block is, and its largest magnitude.
  MPITOPK_INLINE const T* view(size_t i, size_t length, T* room, Bits<T>& most) const {
    for (size_t j = 0; j < length; ++j) {
      room[j] = residual[i + j] + widen<T>(gradient[i + j]);
      most = std::max(most, key_of(room[j]));
    }
    return room;
  }

  MPITOPK_INLINE void store(size_t i, size_t length, const T* room) const {
#if MPITOPK_HAVE_AVX2
    if (streams && length == block) {
      auto* to = reinterpret_cast<__m128i*>(out + i);
      const auto* from = reinterpret_cast<const __m128i*>(room);
      for (size_t j = 0; j < block * sizeof(T) / 16; ++j) _mm_stream_si128(to + j, _mm_load_si128(from + j));
      return;
    }
#endif
    for (size_t j = 0; j < length; ++j) out[i + j] = room[j];
  }

  // How far the first block goes, so that the others begin at a cache line.
  size_t head(size_t start) const {
    const auto misaligned = reinterpret_cast<std::uintptr_t>(out + start) % 64;
    return misaligned == 0 ? block : (64 - misaligned) / sizeof(T);
  }
};

// What is there is only read.
template <class T>
struct Plain {
  static constexpr bool writes = false;
  const T* x;

  MPITOPK_INLINE const T* view(size_t i, size_t length, T*, Bits<T>& most) const {
    for (size_t j = 0; j < length; ++j) most = std::max(most, key_of(x[i + j]));
    return x + i;
  }
  MPITOPK_INLINE void store(size_t, size_t, const T*) const {}
  size_t head(size_t) const { return block; }
};

#if MPITOPK_HAVE_AVX2
MPITOPK_AVX2 inline std::uint64_t hits_avx2(const float* x, std::uint32_t low) {
  const __m256i below = _mm256_set1_epi32(static_cast<int>(low - 1));
  const __m256i magnitude = _mm256_set1_epi32(static_cast<int>(Format<float>::magnitude));
  std::uint64_t mask = 0;
  for (size_t j = 0; j < block; j += 8) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + j));
    const __m256i hit = _mm256_cmpgt_epi32(_mm256_and_si256(bits, magnitude), below);
    mask |= static_cast<std::uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(hit))) << j;
  }
  return mask;
}
#endif

// Bit j says whether x[j] has at least the magnitude `low`.
template <Isa isa, class T>
MPITOPK_INLINE std::uint64_t hits(const T* x, size_t length, Bits<T> low) {
#if MPITOPK_HAVE_AVX2
  if constexpr (isa == Isa::avx2 && std::is_same_v<T, float>) {
    if (length == block) return hits_avx2(x, low);
  }
#endif
  std::uint64_t mask = 0;
  for (size_t j = 0; j < length; ++j) mask |= static_cast<std::uint64_t>(key_of(x[j]) >= low) << j;
  return mask;
}

// Keep the k first by (magnitude descending, index ascending) of what was found from `begin` on, and
// raise the threshold above what cannot win any more. `out`: where zeros are undone, or null.
template <class T>
void keep_largest(Found<T>& found, size_t begin, size_t k, Limits<T>& limits, T* out) {
  T* values = found.values.data();
  Index* indices = found.indices.data();
  const std::array<Stretch<T>, 1> all{{{values + begin, found.count - begin}}};
  const Bits<T> kth = kth_largest(all, k, found.scratch);
  size_t ties = k;
  for (size_t i = begin; i < found.count; ++i) ties -= key_of(values[i]) > kth;
  size_t kept = begin;
  for (size_t i = begin; i < found.count; ++i) {
    const Bits<T> key = key_of(values[i]);
    const bool wins = key > kth || (key == kth && ties > 0);
    if (wins) {
      ties -= key == kth;
      values[kept] = values[i];
      indices[kept++] = indices[i];
    } else if (out != nullptr && key >= limits.sure) {
      out[indices[i]] = values[i];
    }
  }
  found.count = kept;
  limits.low = std::min(static_cast<Bits<T>>(kth + 1), Format<T>::infinity);
}

// Scan a span of which at most `wanted` entries can win; a dense span wants none.
struct Scan {
  template <Isa isa, class T, class Source>
  MPITOPK_INLINE static void run(const Source& source, Span& span, Limits<T>& limits, size_t wanted,
                                 Found<T>& found) {
    alignas(64) T room[block];
    const size_t enough = 2 * wanted + 1024;
    Limits<T> now = limits;
    size_t i = span.start;
    size_t length = std::min(source.head(i), span.stop - i);
    span.begin = found.count;
    while (i < span.stop) {
      if (length == block) {
        one<isa>(source, i, block, now, found, room);
      } else {
        one<isa>(source, i, length, now, found, room);
      }
      if (found.count - span.begin > enough) [[unlikely]] {
        T* out = nullptr;
        if constexpr (Source::writes) out = source.out;
        keep_largest(found, span.begin, wanted, now, out);
      }
      i += length;
      length = std::min(block, span.stop - i);
    }
    span.end = found.count;
  }

 private:
  template <Isa isa, class T, class Source>
  MPITOPK_INLINE static void one(const Source& source, size_t i, size_t length, Limits<T>& limits,
                                 Found<T>& found, T* room) {
    Bits<T> most = 0;
    const T* x = source.view(i, length, room, most);
    if (most >= limits.low) {
      if (most >= Format<T>::infinity) {
        found.finite = false;
        limits.low = Format<T>::none;
      } else {
        found.make_room();
        Index* indices = found.indices.data() + found.count;
        T* values = found.values.data() + found.count;
        size_t n = 0;
        for (std::uint64_t mask = hits<isa>(x, length, limits.low); mask != 0; mask &= mask - 1) {
          const auto j = static_cast<size_t>(std::countr_zero(mask));
          indices[n] = static_cast<Index>(i + j);
          values[n++] = x[j];
        }
        found.count += n;
        if constexpr (Source::writes) {
          // All at once: single stores would stall the loads that copy the block to the accumulator.
          for (size_t j = 0; j < length; ++j) room[j] = key_of(room[j]) >= limits.sure ? T{0} : room[j];
        }
      }
    }
    source.store(i, length, room);
  }
};

}  // namespace mpitopk
