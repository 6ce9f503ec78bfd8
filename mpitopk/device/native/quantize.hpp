// Entries rounded at random to levels of their bucket's scale, in bit planes; and how many ratios there are.
#pragma once

#include <array>
#include <cmath>

#include "codes.hpp"
#include "random.hpp"

namespace mpitopk {

// The largest magnitude of a bucket, or its 2-norm; and whether all of it is finite.
struct Scale {
  template <Isa isa, class T, class G>
  MPITOPK_INLINE static bool run(const G* x, size_t size, bool largest, T* scale) {
    constexpr size_t stretch = 32 * group;
    Bits<G> most = 0;
    double sums[group] = {};
    for (size_t i = 0; i < size; i += stretch) {
      const size_t width = std::min(stretch, size - i);
      for (size_t j = i; j < i + width; ++j) most = std::max(most, key_of(x[j]));
      if (!largest) add_squares<isa>(x + i, width, sums);
    }
    *scale = widen<T>(std::bit_cast<G>(most));
    if (!largest) {
      for (size_t half = group / 2; half > 0; half /= 2) {
        for (size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
      }
      const auto most_of_all = static_cast<double>(std::numeric_limits<T>::max());
      *scale = std::max(*scale, static_cast<T>(std::min(std::sqrt(sums[0]), most_of_all)));
    }
    return most < Format<G>::too_large;
  }

 private:
  template <Isa isa, class G>
  MPITOPK_INLINE static void add_squares(const G* x, size_t size, double* sums) {
    size_t i = 0;
    if constexpr (isa == Isa::avx2 && !std::is_same_v<G, double>) i = add_avx2(x, size, sums);
    for (; i < size; i += group) {
      const size_t width = std::min(group, size - i);
      for (size_t j = 0; j < width; ++j) {
        const double value = widen<double>(x[i + j]);
        sums[j] += value * value;
      }
    }
  }

#if MPITOPK_HAVE_AVX2
  // Add the squares of whole groups; return how many entries that were.
  template <class G>
  MPITOPK_AVX2 static size_t add_avx2(const G* x, size_t size, double* sums) {
    __m256d at[group / 4];
    for (size_t j = 0; j < group / 4; ++j) at[j] = _mm256_loadu_pd(sums + 4 * j);
    size_t i = 0;
    for (; i + group <= size; i += group) {
      for (size_t j = 0; j < group / 8; ++j) {
        const __m256 values = load_floats(x + i + 8 * j);
        const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(values));
        const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
        at[2 * j] = _mm256_add_pd(at[2 * j], _mm256_mul_pd(low, low));
        at[2 * j + 1] = _mm256_add_pd(at[2 * j + 1], _mm256_mul_pd(high, high));
      }
    }
    for (size_t j = 0; j < group / 4; ++j) _mm256_storeu_pd(sums + 4 * j, at[j]);
    return i;
  }
#else
  template <class G>
  static size_t add_avx2(const G*, size_t, double*) { return 0; }
#endif
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
    if (levels.bits == 2) return groups<isa, Few<1>>(x, size, first, scale, levels, key, words);
    if (levels.bits == 3) return groups<isa, Few<3>>(x, size, first, scale, levels, key, words);
    if (levels.uniform) return groups<isa, Equidistant>(x, size, first, scale, levels, key, words);
    groups<isa, Searched>(x, size, first, scale, levels, key, words);
  }

 private:
  // What rounds a group: Few tries every level above 0.
  template <int top>
  struct Few {
    template <Isa>
    MPITOPK_INLINE static void run(const float* ratios, const float* random, const Levels& levels,
                                   std::uint32_t* q) {
      for (size_t i = 0; i < group; ++i) {
        q[i] = 0;
#pragma GCC unroll 4
        for (int j = 0; j < top; ++j) {
          q[i] += static_cast<std::uint32_t>((ratios[i] >= levels.at[j + 1]) |
                                             (ratios[i] > levels.at[j] + random[i] * levels.gap[j]));
        }
      }
    }
  };

  // The nearest level is computed, which is the one above or the one below.
  struct Equidistant {
    template <Isa>
    MPITOPK_INLINE static void run(const float* ratios, const float* random, const Levels& levels,
                                   std::uint32_t* q) {
      const auto top = static_cast<float>(levels.top());
      for (size_t i = 0; i < group; ++i) {
        auto j = static_cast<std::int32_t>(bits_of(ratios[i] * top + 0x1p23f) - bits_of(0x1p23f));
        j -= ratios[i] < levels.equidistant(static_cast<float>(j));
        const float below = levels.equidistant(static_cast<float>(j));
        const float gap = levels.equidistant(static_cast<float>(j + 1)) - below;
        q[i] = static_cast<std::uint32_t>(j + (ratios[i] > below + random[i] * gap));
      }
    }
  };

  // The level below is searched by halves.
  struct Searched {
    template <Isa isa>
    MPITOPK_INLINE static void run(const float* ratios, const float* random, const Levels& levels,
                                   std::uint32_t* q) {
      if constexpr (isa == Isa::avx2) {
        if (levels.form() == Form::few) return search_avx2(ratios, random, levels, q);
      }
      for (size_t i = 0; i < group; ++i) {
        std::uint32_t j = 0;
        for (std::uint32_t half = levels.half(); half > 0; half /= 2) {
          j += ratios[i] >= levels.at[j + half] ? half : 0;
        }
        q[i] = j + static_cast<std::uint32_t>(ratios[i] > levels.at[j] + random[i] * levels.gap[j]);
      }
    }

   private:
#if MPITOPK_HAVE_AVX2
    MPITOPK_AVX2 static void search_avx2(const float* ratios, const float* random, const Levels& levels,
                                         std::uint32_t* q) {
      const __m256 at = _mm256_loadu_ps(levels.at.data());
      const __m256 gap = _mm256_loadu_ps(levels.gap.data());
      for (size_t i = 0; i < group; i += 8) {
        const __m256 ratio = _mm256_loadu_ps(ratios + i);
        __m256i j = _mm256_setzero_si256();
        for (std::uint32_t half = levels.half(); half > 0; half /= 2) {
          const __m256i further = _mm256_or_si256(j, _mm256_set1_epi32(static_cast<int>(half)));
          const __m256 reached = _mm256_cmp_ps(ratio, _mm256_permutevar8x32_ps(at, further), _CMP_GE_OQ);
          j = _mm256_blendv_epi8(j, further, _mm256_castps_si256(reached));
        }
        const __m256 part = _mm256_mul_ps(_mm256_loadu_ps(random + i), _mm256_permutevar8x32_ps(gap, j));
        const __m256 limit = _mm256_add_ps(_mm256_permutevar8x32_ps(at, j), part);
        const __m256i above = _mm256_castps_si256(_mm256_cmp_ps(ratio, limit, _CMP_GT_OQ));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + i), _mm256_sub_epi32(j, above));
      }
    }
#else
    static void search_avx2(const float*, const float*, const Levels&, std::uint32_t*) {}
#endif
  };

  template <Isa isa, class Round, class T, class G>
  MPITOPK_INLINE static void groups(const G* x, size_t size, size_t first, T scale, const Levels& levels,
                                    std::uint64_t key, std::uint32_t* words) {
    const T divisor = divisor_of(scale);
    for (size_t begin = 0; begin < size; begin += group, words += levels.bits) {
      // The next bucket, of which the scale comes first.
      for (size_t i = 0; i < group; i += 64 / sizeof(G)) __builtin_prefetch(x + size + begin + i);
      if (begin + group <= size) {
        one<isa, Round>(x + begin, first + begin, divisor, levels, key, words);
      } else {
        G rest[group] = {};
        std::copy(x + begin, x + size, rest);
        one<isa, Round>(rest, first + begin, divisor, levels, key, words);
      }
    }
  }

  template <Isa isa, class Round, class T, class G>
  MPITOPK_INLINE static void one(const G* x, size_t first, T divisor, const Levels& levels, std::uint64_t key,
                                 std::uint32_t* words) {
    const auto low = static_cast<std::uint32_t>(key);
    const auto high = static_cast<std::uint32_t>(key >> 32);
    const auto start = static_cast<std::uint32_t>(first);
    float ratios[group], random[group];
    std::uint32_t codes[group];
    for (std::uint32_t i = 0; i < group; ++i) {
      ratios[i] = static_cast<float>(std::bit_cast<T>(key_of(widen<T>(x[i]))) / divisor);
      const std::uint32_t mixed = mix(mix((start + i) ^ low) ^ high);
      random[i] = static_cast<float>(static_cast<std::int32_t>(mixed >> 8)) * 0x1p-24f;
    }
    Round::template run<isa>(ratios, random, levels, codes);
    for (size_t i = 0; i < group; ++i) {
      codes[i] = 2 * codes[i] + static_cast<std::uint32_t>(bits_of(x[i]) >> (8 * sizeof(G) - 1));
    }
    write_planes<isa>(codes, levels.bits, words);
  }
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

}  // namespace mpitopk
