// Signs and levels of entries in bit planes, and the sum of what messages of them stand for.
#pragma once

#include <array>
#include <cmath>
#include <vector>

#include "elementwise.hpp"

namespace mpitopk {

// Entries whose codes share words: bit b of the code of entry i is bit i of word b.
constexpr size_t group = 32;
constexpr int most_bits = 8;

// How a level is found: in a register, as a product, or in memory.
enum class Form { few, equidistant, any };

// Levels of magnitude, ascending from 0 to 1, and the gap above each of them.
struct Levels {
  std::array<float, 1 << (most_bits - 1)> at{}, gap{};
  float coarse, fine;
  int bits;
  bool uniform = true;

  Levels(const float* levels, int width) : bits(width) {
    coarse = std::floor(0x1p24f / static_cast<float>(top())) * 0x1p-24f;
    fine = static_cast<float>(1.0 / top() - static_cast<double>(coarse));
    for (int j = 0; j <= top(); ++j) {
      at[j] = levels[j];
      if (j > 0) gap[j - 1] = at[j] - at[j - 1];
      uniform = uniform && at[j] == equidistant(static_cast<float>(j));
    }
  }

  int top() const { return (1 << (bits - 1)) - 1; }
  std::uint32_t half() const { return 1u << (bits - 2); }

  Form form() const { return bits <= 4 ? Form::few : uniform ? Form::equidistant : Form::any; }

  // j / top(), rounded right: the first product is exact, the second much less than its last digit.
  MPITOPK_INLINE float equidistant(float j) const { return j * coarse + j * fine; }
};

// Codes of a group, 2 q + sign, to words.
template <Isa isa>
MPITOPK_INLINE void write_planes(const std::uint32_t* codes, int bits, std::uint32_t* words) {
  for (int b = 0; b < bits; ++b) {
    words[b] = 0;
    for (std::uint32_t i = 0; i < group; ++i) words[b] |= ((codes[i] >> b) & 1u) << i;
  }
}

// Words to codes of a group, which are bytes, and the sign the highest bit of each: q | sign << 7.
template <Isa isa>
MPITOPK_INLINE void read_planes(const std::uint32_t* words, int bits, std::uint8_t* codes) {
  std::fill(codes, codes + group, std::uint8_t{0});
  for (int b = 0; b < bits; ++b) {
    const int place = (b + 7) % 8;
    for (std::uint32_t i = 0; i < group; ++i) {
      codes[i] |= static_cast<std::uint8_t>(((words[b] >> i) & 1u) << place);
    }
  }
}

#if MPITOPK_HAVE_AVX2
// The highest bits of all codes to the sign bits of bytes, and then the others, one after the other.
template <>
MPITOPK_AVX2 inline void write_planes<Isa::avx2>(const std::uint32_t* codes, int bits, std::uint32_t* words) {
  const auto* from = reinterpret_cast<const __m256i*>(codes);
  const __m256i first = _mm256_packus_epi32(_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1));
  const __m256i second = _mm256_packus_epi32(_mm256_loadu_si256(from + 2), _mm256_loadu_si256(from + 3));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
  bytes = _mm256_slli_epi16(bytes, most_bits - bits);
  for (int b = bits - 1; b >= 0; --b, bytes = _mm256_add_epi8(bytes, bytes)) {
    words[b] = static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
  }
}

// Bytes of ones for the bits that are set: a byte of the word goes to 8 bytes, which look at their bits.
MPITOPK_AVX2_INLINE __m256i spread(std::uint32_t word) {
  const __m256i order = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i own = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(word)), order);
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, own), own);
}

// Each bit moves up those that are there already; the sign comes last.
MPITOPK_AVX2_INLINE __m256i read_planes(const std::uint32_t* words, int bits) {
  __m256i codes = _mm256_setzero_si256();
  for (int b = bits - 1; b > 0; --b) codes = _mm256_sub_epi8(_mm256_add_epi8(codes, codes), spread(words[b]));
  return _mm256_or_si256(codes, _mm256_and_si256(spread(words[0]), _mm256_set1_epi8(-128)));
}

template <>
MPITOPK_AVX2 inline void read_planes<Isa::avx2>(const std::uint32_t* words, int bits, std::uint8_t* codes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), read_planes(words, bits));
}
#endif

// One rank's message: the scales of its buckets, the words of its codes, and the levels that they mean.
template <class T>
struct Coded {
  const T* scales;
  const std::uint32_t* words;
  Levels levels;
};

// Add what a message says of `size` entries from `first`, a multiple of `group`, to `sums`: room for whole
// groups.
struct Decode {
  template <Isa isa, class T>
  MPITOPK_INLINE static void run(const Coded<T>& message, size_t bucket, size_t first, size_t size, T* sums) {
    const Levels& levels = message.levels;
    const size_t end = first + (size + group - 1) / group * group;
    for (size_t stop; first < end; sums += stop - first, first = stop) {
      const size_t b = first / bucket;
      stop = std::min(end, (b + 1) * bucket);
      const std::uint32_t* words = message.words + first / group * static_cast<size_t>(levels.bits);
      const size_t groups = (stop - first) / group;
      if constexpr (isa == Isa::avx2 && std::is_same_v<T, float>) {
        constexpr std::array adds{add_avx2<Form::few>, add_avx2<Form::equidistant>, add_avx2<Form::any>};
        adds[static_cast<size_t>(levels.form())](words, groups, levels, message.scales[b], sums);
      } else {
        add<isa>(words, groups, levels, message.scales[b], sums);
      }
    }
  }

 private:
  template <Isa isa, class T>
  MPITOPK_INLINE static void add(const std::uint32_t* words, size_t groups, const Levels& levels, T scale,
                                 T* sums) {
    for (size_t g = 0; g < groups; ++g, words += levels.bits, sums += group) {
      std::uint8_t codes[group];
      read_planes<isa>(words, levels.bits, codes);
      for (size_t i = 0; i < group; ++i) {
        const T value = static_cast<T>(levels.at[codes[i] & 127u]) * scale;
        const auto sign = static_cast<Bits<T>>(static_cast<Bits<T>>(codes[i] >> 7) << (8 * sizeof(T) - 1));
        sums[i] += std::bit_cast<T>(bits_of(value) | sign);
      }
    }
  }

#if MPITOPK_HAVE_AVX2
  template <Form form>
  MPITOPK_AVX2_INLINE static __m256 levels_of(const Levels& levels, __m256i codes) {
    if constexpr (form == Form::few) {
      return _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels.at.data()), codes);
    } else {
      const __m256i q = _mm256_and_si256(codes, _mm256_set1_epi32(127));
      if constexpr (form == Form::any) return _mm256_i32gather_ps(levels.at.data(), q, sizeof(float));
      const __m256 j = _mm256_cvtepi32_ps(q);
      const __m256 coarse = _mm256_mul_ps(j, _mm256_set1_ps(levels.coarse));
      return _mm256_add_ps(coarse, _mm256_mul_ps(j, _mm256_set1_ps(levels.fine)));
    }
  }

  template <Form form>
  MPITOPK_AVX2 static void add_avx2(const std::uint32_t* words, size_t groups, const Levels& levels,
                                    float scale, float* sums) {
    const __m256 factor = _mm256_set1_ps(scale);
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (size_t g = 0; g < groups; ++g, words += levels.bits) {
      const __m256i bytes = read_planes(words, levels.bits);
      const __m128i halves[] = {_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)};
      for (int j = 0; j < 4; ++j, sums += 8) {
        const __m128i half = halves[j / 2];
        const __m256i codes = _mm256_cvtepi8_epi32(j % 2 == 0 ? half : _mm_unpackhi_epi64(half, half));
        const __m256 size = _mm256_mul_ps(levels_of<form>(levels, codes), factor);
        const __m256 value = _mm256_or_ps(size, _mm256_and_ps(_mm256_castsi256_ps(codes), sign));
        _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_loadu_ps(sums), value));
      }
    }
  }
#else
  template <Form form>
  static void add_avx2(const std::uint32_t*, size_t, const Levels&, float, float*) {}
#endif
};

// Write sums over a divisor, past the caches where `streams`.
struct WriteMean {
  template <Isa isa, class T>
  MPITOPK_INLINE static void run(const T* sums, size_t size, T divisor, T* out, bool streams) {
    size_t i = 0;
    if constexpr (isa == Isa::avx2 && std::is_same_v<T, float>) {
      if (streams && reinterpret_cast<std::uintptr_t>(out) % 32 == 0) i = stream(sums, size, divisor, out);
    }
    for (; i < size; ++i) out[i] = sums[i] / divisor;
  }

 private:
#if MPITOPK_HAVE_AVX2
  MPITOPK_AVX2 static size_t stream(const float* sums, size_t size, float divisor, float* out) {
    const __m256 below = _mm256_set1_ps(divisor);
    size_t i = 0;
    for (; i + 8 <= size; i += 8) _mm256_stream_ps(out + i, _mm256_div_ps(_mm256_loadu_ps(sums + i), below));
    return i;
  }
#else
  static size_t stream(const float*, size_t, float, float*) { return 0; }
#endif
};

template <class T>
void merge_codes(Pool& pool, Isa isa, const std::vector<Coded<T>>& messages, size_t bucket, T divisor, T* out,
                 size_t size, bool streams) {
  constexpr size_t stretch = 2048;
  for_parts(
      pool, size,
      [&](size_t first, size_t part) {
        alignas(64) T sums[stretch];
        for (size_t i = first; i < first + part; i += stretch) {
          const size_t width = std::min(stretch, first + part - i);
          std::fill(sums, sums + stretch, T{0});
          for (const Coded<T>& message : messages) run_on<Decode>(isa, message, bucket, i, width, sums);
          run_on<WriteMean>(isa, sums, width, divisor, out + i, streams);
        }
      },
      stretch);
}

}  // namespace mpitopk
