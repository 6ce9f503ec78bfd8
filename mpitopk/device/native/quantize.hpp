// Entries rounded at random to levels of their bucket's scale, in bit planes; and the sum of such messages.
#pragma once

#include <array>
#include <cmath>

#include "elementwise.hpp"
#include "lanes.hpp"
#include "random.hpp"

namespace mpitopk {

// Entries whose codes share words: bit b of the code of entry i is bit i of word b.
constexpr size_t group = 32;
constexpr int most_bits = 8;

// Levels of magnitude, ascending from 0 to 1, and the gap above each of them.
struct Levels {
  std::array<float, 1 << (most_bits - 1)> at{}, gap{};
  int bits;
  bool uniform = true;

  Levels(const float* levels, int width) : bits(width) {
    for (int j = 0; j <= top(); ++j) {
      at[j] = levels[j];
      if (j > 0) gap[j - 1] = at[j] - at[j - 1];
      uniform = uniform && at[j] == static_cast<float>(j) / static_cast<float>(top());
    }
  }

  int top() const { return (1 << (bits - 1)) - 1; }
};

// The largest magnitude of a bucket, or its 2-norm; and whether all of it is finite.
struct Scale {
  template <Isa, class T, class G>
  MPITOPK_INLINE static bool run(const G* x, size_t size, bool largest, T* scale) {
    Bits<G> most = 0;
    double sums[group] = {};
    size_t i = 0;
    for (; i + group <= size; i += group) {
      for (size_t j = 0; j < group; ++j) most = std::max(most, key_of(x[i + j]));
      if (largest) continue;
      for (size_t j = 0; j < group; ++j) {
        const double value = widen<double>(x[i + j]);
        sums[j] += value * value;
      }
    }
    for (size_t j = 0; i + j < size; ++j) {
      most = std::max(most, key_of(x[i + j]));
      const double value = widen<double>(x[i + j]);
      sums[j] += value * value;
    }
    const T top = widen<T>(std::bit_cast<G>(most));
    if (largest) {
      *scale = top;
    } else {
      for (size_t half = group / 2; half > 0; half /= 2) {
        for (size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
      }
      const double norm = std::min(std::sqrt(sums[0]), static_cast<double>(std::numeric_limits<T>::max()));
      *scale = std::max(top, static_cast<T>(norm));
    }
    return most < Format<G>::too_large;
  }
};

template <class T>
MPITOPK_INLINE T divisor_of(T scale) {
  return scale > 0 ? scale : T{1};
}

// A bucket of `size` entries, the first of which is number `first`, to `bits` words for each group.
struct Quantize {
  template <Isa isa, class T, class G>
  MPITOPK_INLINE static void run(const G* x, size_t size, size_t first, T scale, const Levels& levels,
                                 std::uint64_t key, std::uint32_t* words) {
    switch (levels.bits > 3 && levels.uniform ? 0 : levels.bits) {
      case 0:
        return search<isa, 0>(x, size, first, scale, levels, key, words);
      case 2:
        return search<isa, 2>(x, size, first, scale, levels, key, words);
      case 3:
        return search<isa, 3>(x, size, first, scale, levels, key, words);
      case 4:
        return search<isa, 4>(x, size, first, scale, levels, key, words);
      default:
        return search<isa, most_bits>(x, size, first, scale, levels, key, words);
    }
  }

 private:
  // `width`: how many bits, if the levels are to be tried one by one; 0 if they are to be computed;
  // most_bits if they are to be searched.
  template <Isa isa, int width, class T, class G>
  MPITOPK_INLINE static void search(const G* x, size_t size, size_t first, T scale, const Levels& levels,
                                    std::uint64_t key, std::uint32_t* words) {
    const T divisor = divisor_of(scale);
    const int bits = levels.bits;
    for (size_t begin = 0; begin < size; begin += group, words += bits) {
      if (begin + group <= size) {
        quantize_group<isa, width>(x + begin, first + begin, divisor, levels, key, words);
      } else {
        G rest[group] = {};
        std::copy(x + begin, x + size, rest);
        quantize_group<isa, width>(rest, first + begin, divisor, levels, key, words);
      }
    }
  }

  template <Isa isa, int width, class T, class G>
  MPITOPK_INLINE static void quantize_group(const G* x, size_t first, T divisor, const Levels& levels,
                                            std::uint64_t key, std::uint32_t* words) {
    const auto low = static_cast<std::uint32_t>(key);
    const auto high = static_cast<std::uint32_t>(key >> 32);
    const auto start = static_cast<std::uint32_t>(first);
    const int top = levels.top();
    std::uint32_t codes[group];
    for (std::uint32_t i = 0; i < group; ++i) {
      const T value = widen<T>(x[i]);
      const auto ratio = static_cast<float>(std::bit_cast<T>(key_of(value)) / divisor);
      const std::uint32_t random = mix(mix((start + i) ^ low) ^ high);
      const float u = static_cast<float>(static_cast<std::int32_t>(random >> 8)) * 0x1p-24f;
      std::uint32_t q = 0;
      if constexpr (width > 0 && width < most_bits) {
#pragma GCC unroll 8
        for (int j = 0; j < (1 << (width - 1)) - 1; ++j) {
          q += static_cast<std::uint32_t>((ratio >= levels.at[j + 1]) | (ratio > levels.at[j] + u * levels.gap[j]));
        }
      } else if constexpr (width == 0) {
        const auto parts = static_cast<float>(top);
        int c = std::min(static_cast<int>(ratio * parts), top - 1);
        c -= ratio < static_cast<float>(c) / parts;
        c += (c < top - 1) & (ratio >= static_cast<float>(c + 1) / parts);
        const float below = static_cast<float>(c) / parts;
        const float above = static_cast<float>(c + 1) / parts;
        q = static_cast<std::uint32_t>(c + ((ratio >= above) | (ratio > below + u * (above - below))));
      } else {
        int c = 0;
        for (int half = (top + 1) / 2; half > 0; half /= 2) c += ratio >= levels.at[c + half] ? half : 0;
        q = static_cast<std::uint32_t>(c + ((c < top) & (ratio > levels.at[c] + u * levels.gap[c])));
      }
      codes[i] = 2 * q + static_cast<std::uint32_t>(bits_of(value) >> (8 * sizeof(T) - 1));
    }
    const int bits = width > 0 && width < most_bits ? width : levels.bits;
    if constexpr (isa == Isa::avx2) {
      planes_avx2(codes, bits, words);
    } else {
      for (int b = 0; b < bits; ++b) {
        words[b] = 0;
        for (std::uint32_t i = 0; i < group; ++i) words[b] |= ((codes[i] >> b) & 1u) << i;
      }
    }
  }

#if MPITOPK_HAVE_AVX2
  // The lowest bits of all codes to the sign bits of bytes, one after the other.
  MPITOPK_AVX2 static void planes_avx2(const std::uint32_t* codes, int bits, std::uint32_t* words) {
    const auto* from = reinterpret_cast<const __m256i*>(codes);
    const __m256i first = _mm256_packus_epi32(_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1));
    const __m256i second = _mm256_packus_epi32(_mm256_loadu_si256(from + 2), _mm256_loadu_si256(from + 3));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
    for (int b = 0; b < bits; ++b) {
      words[b] = static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7 - b)));
    }
  }
#else
  static void planes_avx2(const std::uint32_t*, int, std::uint32_t*) {}
#endif
};

// One rank's message: the scales of its buckets, the words of its codes, and the levels that they mean.
template <class T>
struct Coded {
  const T* scales;
  const std::uint32_t* words;
  std::array<T, 1 << (most_bits - 1)> levels;
};

// Add what a message says of `size` entries from `first`, a multiple of `group`, to `out`.
struct Decode {
  template <Isa isa, class T>
  MPITOPK_INLINE static void run(const Coded<T>& message, int bits, size_t bucket, size_t first, size_t size, T* out) {
    const std::uint32_t* words = message.words + first / group * static_cast<size_t>(bits);
    for (size_t begin = 0; begin < size; begin += group, words += bits) {
      const T scale = message.scales[(first + begin) / bucket];
      std::uint8_t codes[group] = {};
      if constexpr (isa == Isa::avx2) {
        codes_avx2(words, bits, codes);
      } else {
        for (int b = 0; b < bits; ++b) {
          for (std::uint32_t i = 0; i < group; ++i) codes[i] |= static_cast<std::uint8_t>(((words[b] >> i) & 1u) << b);
        }
      }
      T values[group];
      for (size_t i = 0; i < group; ++i) {
        const T value = message.levels[codes[i] >> 1] * scale;
        values[i] = std::bit_cast<T>(bits_of(value) | static_cast<Bits<T>>(codes[i] & 1) << (8 * sizeof(T) - 1));
      }
      const size_t width = std::min(group, size - begin);
      for (size_t i = 0; i < width; ++i) out[begin + i] += values[i];
    }
  }

 private:
#if MPITOPK_HAVE_AVX2
  // A byte of each word goes to 8 bytes, each of which keeps its bit.
  MPITOPK_AVX2 static void codes_avx2(const std::uint32_t* words, int bits, std::uint8_t* codes) {
    const __m256i order = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i own = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
    __m256i found = _mm256_setzero_si256();
    for (int b = 0; b < bits; ++b) {
      const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(words[b])), order);
      const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, own), own);
      found = _mm256_or_si256(found, _mm256_and_si256(set, _mm256_set1_epi8(static_cast<char>(1 << b))));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), found);
  }
#else
  static void codes_avx2(const std::uint32_t*, int, std::uint8_t*) {}
#endif
};

// How many ratios of a bucket lie in which bin: by their exponents, from 2^-24, and three bits more. One is
// for exactly 1, and one for what is not finite.
constexpr size_t ratio_bins = 194;

template <class T, class G>
void count_ratios_of(const G* x, size_t size, T scale, std::int64_t* counts) {
  const T divisor = divisor_of(scale);
  for (size_t i = 0; i < size; ++i) {
    const T magnitude = std::bit_cast<T>(key_of(widen<T>(x[i])));
    const auto bin = static_cast<int>(key_of(static_cast<float>(magnitude / divisor)) >> 20) - (127 - 24) * 8;
    ++counts[std::clamp(bin, 0, static_cast<int>(ratio_bins) - 1)];
  }
}

// Call f(bucket, first, size) for all buckets, on all threads; return whether it is true of all.
template <class F>
bool for_buckets(Pool& pool, size_t size, size_t bucket, F&& f) {
  return all_parts(
      pool, size,
      [&](size_t first, size_t part) {
        bool all = true;
        for (size_t i = first; i < first + part; i += bucket) {
          all = f(i / bucket, i, std::min(bucket, first + part - i)) && all;
        }
        return all;
      },
      bucket);
}

template <class T>
void merge_codes(Pool& pool, Isa isa, const std::vector<Coded<T>>& messages, int bits, size_t bucket, T divisor, T* out,
                 size_t size) {
  constexpr size_t stretch = 4096;
  for_parts(
      pool, size,
      [&](size_t first, size_t part) {
        for (size_t i = first; i < first + part; i += stretch) {
          const size_t width = std::min(stretch, first + part - i);
          std::fill(out + i, out + i + width, T{0});
          for (const Coded<T>& message : messages) run_on<Decode>(isa, message, bits, bucket, i, width, out + i);
          run_on<Divide>(isa, out + i, width, divisor);
        }
      },
      stretch);
}

}  // namespace mpitopk
