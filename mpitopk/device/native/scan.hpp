// One streaming pass: accumulate, keep what may win, and notice what is too large.
#pragma once

#include <array>
#include <bit>
#include <cstring>

#include "buffer.hpp"
#include "isa.hpp"
#include "kth.hpp"
#include "lanes.hpp"
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
  Buffer<Index> open_indices;  // those inside the windows
  Buffer<T> open;
  size_t open_count = 0;
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

  MPITOPK_INLINE void prefetch(size_t i) const {
    __builtin_prefetch(gradient + i);
    __builtin_prefetch(residual + i);
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

#if MPITOPK_HAVE_AVX2
  MPITOPK_AVX2_INLINE __m256 load(size_t i) const {
    return _mm256_add_ps(_mm256_loadu_ps(residual + i), load_floats(gradient + i));
  }

  MPITOPK_AVX2_INLINE void store(size_t i, __m256 x) const {
    if (streams) {
      _mm256_stream_ps(out + i, x);
    } else {
      _mm256_storeu_ps(out + i, x);
    }
  }
#endif

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
  MPITOPK_INLINE void prefetch(size_t i) const { __builtin_prefetch(x + i); }
  MPITOPK_INLINE void store(size_t, size_t, const T*) const {}

#if MPITOPK_HAVE_AVX2
  MPITOPK_AVX2_INLINE __m256 load(size_t i) const { return _mm256_loadu_ps(x + i); }
  MPITOPK_AVX2_INLINE void store(size_t, __m256) const {}
#endif

  size_t head(size_t) const { return block; }
};

// Bit j says whether x[j] has at least the magnitude `low`.
template <class T>
MPITOPK_INLINE std::uint64_t hits(const T* x, size_t length, Bits<T> low) {
  std::uint64_t mask = 0;
  for (size_t j = 0; j < length; ++j) mask |= static_cast<std::uint64_t>(key_of(x[j]) >= low) << j;
  return mask;
}

#if MPITOPK_HAVE_AVX2
// A block of floats in registers.
struct Block {
  static constexpr size_t lanes = 8;
  static constexpr size_t vectors = block / lanes;
  __m256 x[vectors];

  MPITOPK_AVX2_INLINE __m256i keys(size_t j) const {
    const __m256i magnitude = _mm256_set1_epi32(static_cast<int>(Format<float>::magnitude));
    return _mm256_and_si256(_mm256_castps_si256(x[j]), magnitude);
  }
};

MPITOPK_AVX2_INLINE __m256i just_below(Bits<float> limit) { return _mm256_set1_epi32(static_cast<int>(limit - 1)); }

// Append the candidates of a block that begins at entry i, and set the sure ones to zero.
MPITOPK_AVX2 inline void keep(Block& at, size_t i, const Limits<float>& limits, Found<float>& found) {
  found.make_room();
  const __m256i low = just_below(limits.low);
  const __m256i sure = just_below(limits.sure);
  Index* indices = found.indices.data() + found.count;
  float* values = found.values.data() + found.count;
  const Index* const first = indices;
  for (size_t j = 0; j < Block::vectors; ++j) {
    const __m256i keys = at.keys(j);
    const Kept kept = compress(_mm256_cmpgt_epi32(keys, low));
    const __m256i base = _mm256_set1_epi32(static_cast<int>(i + j * Block::lanes));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(indices), _mm256_add_epi32(base, kept.lanes));
    _mm256_storeu_ps(values, _mm256_permutevar8x32_ps(at.x[j], kept.lanes));
    indices += kept.count;
    values += kept.count;
    at.x[j] = _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(keys, sure)), at.x[j]);
  }
  found.count += static_cast<size_t>(indices - first);
}

// Scan whole blocks from entry i on, until less than a block is left or more than `enough` candidates
// are found; return where that was.
template <class Source>
MPITOPK_AVX2 size_t scan_blocks(const Source source, size_t i, size_t stop, Limits<float>& limits,
                                Found<float>& found, size_t enough) {
  const __m256i too_large = just_below(Format<float>::too_large);
  __m256i low = just_below(limits.low);
  for (; stop - i >= block; i += block) {
    Block at;
    __m256i most = _mm256_setzero_si256();
    for (size_t j = 0; j < Block::vectors; ++j) {
      at.x[j] = source.load(i + j * Block::lanes);
      most = _mm256_max_epi32(most, at.keys(j));
    }
    if (!any_above(most, low)) {
      for (size_t j = 0; j < Block::vectors; ++j) source.store(i + j * Block::lanes, at.x[j]);
      continue;
    }
    if (any_above(most, too_large)) {
      found.finite = false;
      limits.low = Format<float>::none;
      return stop;
    }
    Block kept = at;  // a copy, since this one has its address taken and the other stays in registers
    keep(kept, i, limits, found);
    for (size_t j = 0; j < Block::vectors; ++j) source.store(i + j * Block::lanes, kept.x[j]);
    if (found.count > enough) return i + block;
  }
  return i;
}
#endif

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
  limits.low = std::min(static_cast<Bits<T>>(kth + 1), Format<T>::too_large);
}

// Tell the candidates that are sure from those that are to be looked at again.
template <class T>
MPITOPK_INLINE void sift(Span& span, Bits<T> sure, Found<T>& found) {
  const size_t most = found.open_count + (span.end - span.begin);
  const Index* indices = found.indices.data();
  const T* values = found.values.data();
  Index* open_indices = found.open_indices.reserve(most, found.open_count);
  T* open = found.open.reserve(most, found.open_count);
  span.open_begin = found.open_count;
  for (size_t i = span.begin; i < span.end; ++i) {
    open_indices[found.open_count] = indices[i];
    open[found.open_count] = values[i];
    found.open_count += key_of(values[i]) < sure;
  }
  span.open_end = found.open_count;
  span.sure = (span.end - span.begin) - (span.open_end - span.open_begin);
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
      if (length < block) {
        one(source, i, length, now, found, room);
        i += length;
      } else if constexpr (isa == Isa::avx2 && std::is_same_v<T, float>) {
        i = scan_blocks(source, i, span.stop, now, found, span.begin + enough);
      } else {
        one(source, i, block, now, found, room);
        i += block;
      }
      if (found.count - span.begin > enough) [[unlikely]] {
        T* out = nullptr;
        if constexpr (Source::writes) out = source.out;
        keep_largest(found, span.begin, wanted, now, out);
      }
      length = std::min(block, span.stop - i);
    }
    span.end = found.count;
    sift(span, limits.sure, found);
  }

 private:
  template <class T, class Source>
  MPITOPK_INLINE static void one(const Source& source, size_t i, size_t length, Limits<T>& limits,
                                 Found<T>& found, T* room) {
    Bits<T> most = 0;
    const T* x = source.view(i, length, room, most);
    if (most >= limits.low) {
      if (most >= Format<T>::too_large) {
        found.finite = false;
        limits.low = Format<T>::none;
      } else {
        found.make_room();
        Index* indices = found.indices.data() + found.count;
        T* values = found.values.data() + found.count;
        size_t n = 0;
        for (std::uint64_t mask = hits(x, length, limits.low); mask != 0; mask &= mask - 1) {
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
