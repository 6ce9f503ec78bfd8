// Blocks of entries, each rounded to a multiple of the nearest vector of a codebook: the code, and the sum of
// the codes of all ranks. Threads own groups of blocks.
#pragma once

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "elementwise.hpp"

namespace mpitopk {

struct Lines {
  static constexpr size_t group = 1024;
  static constexpr size_t longest = 64;
  static constexpr size_t width = 32;  // vectors compared with at once

  const float* vectors;  // a row for each
  const float* columns;  // a column for each, and zeros up to a multiple of `width`
  size_t entries, block, stride;
  int bits, hinge_bits;

  size_t blocks() const { return (entries + block - 1) / block; }
  size_t groups() const { return (blocks() + group - 1) / group; }
  double most() const { return static_cast<double>((1 << (hinge_bits - 1)) - 1); }

  // Words before the bit planes, before the coefficients, and in all.
  template <class T>
  size_t before_planes() const {
    return groups() * (sizeof(T) / 4);
  }
  template <class T>
  size_t before_hinges() const {
    return before_planes<T>() + (blocks() + 31) / 32 * static_cast<size_t>(bits);
  }
  template <class T>
  size_t words() const {
    return before_hinges<T>() + (blocks() * static_cast<size_t>(hinge_bits) + 31) / 32;
  }
};

// For each of `classes` classes of vectors, by turns: the largest |product| with v, and the first vector that has it.
constexpr size_t classes = 8;

template <class T>
MPITOPK_INLINE void compare(const T* v, const Lines& lines, T* best, std::int32_t* at) {
  for (size_t k = 0; k < size_t{1} << lines.bits; ++k) {
    T sum = 0;
    for (size_t j = 0; j < lines.block; ++j) sum += v[j] * static_cast<T>(lines.vectors[k * lines.block + j]);
    if (std::abs(sum) > best[k % classes]) {
      best[k % classes] = std::abs(sum);
      at[k % classes] = static_cast<std::int32_t>(k);
    }
  }
}

#if MPITOPK_HAVE_AVX2
// Left to the compiler, the sums go through memory.
MPITOPK_AVX2 inline void compare_avx2(const float* v, const Lines& lines, float* best, std::int32_t* at) {
  const __m256 unsign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  __m256 most = _mm256_loadu_ps(best);
  __m256i first = _mm256_setzero_si256();
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (size_t k = 0; k < lines.stride; k += Lines::width) {
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (size_t j = 0; j < lines.block; ++j) {
      const __m256 x = _mm256_set1_ps(v[j]);
      const float* column = lines.columns + j * lines.stride + k;
      for (size_t q = 0; q < 4; ++q) {
        sums[q] = _mm256_add_ps(sums[q], _mm256_mul_ps(x, _mm256_loadu_ps(column + 8 * q)));
      }
    }
    for (size_t q = 0; q < 4; ++q) {
      const __m256 size = _mm256_and_ps(sums[q], unsign);
      const __m256 above = _mm256_cmp_ps(size, most, _CMP_GT_OQ);
      const __m256i here = _mm256_add_epi32(lane, _mm256_set1_epi32(static_cast<int>(k + 8 * q)));
      most = _mm256_blendv_ps(most, size, above);
      first = _mm256_blendv_epi8(first, here, _mm256_castps_si256(above));
    }
  }
  _mm256_storeu_ps(best, most);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), first);
}
#endif

// The line nearest to each block of `x`, and the product with its vector.
struct Nearest {
  template <Isa isa, class T>
  MPITOPK_INLINE static void run(const T* x, size_t entries, const Lines& lines, std::uint16_t* numbers, T* products) {
    for (size_t start = 0; start < entries; start += lines.block) {
      T v[Lines::longest] = {};
      std::copy_n(x + start, std::min(lines.block, entries - start), v);
      T best[classes];
      std::int32_t at[classes] = {};
      std::fill_n(best, classes, T{-1});
      if constexpr (isa == Isa::avx2 && std::is_same_v<T, float>) {
#if MPITOPK_HAVE_AVX2
        compare_avx2(v, lines, best, at);
#endif
      } else {
        compare(v, lines, best, at);
      }
      size_t lane = 0;
      for (size_t k = 1; k < classes; ++k) {
        if (best[k] > best[lane] || (best[k] == best[lane] && at[k] < at[lane])) lane = k;
      }
      const auto number = static_cast<size_t>(at[lane]);
      T product = 0;
      for (size_t j = 0; j < lines.block; ++j) product += v[j] * static_cast<T>(lines.vectors[number * lines.block + j]);
      *numbers++ = static_cast<std::uint16_t>(number);
      *products++ = product;
    }
  }
};

// The parts of words of code that a group has. H: type of a coefficient.
template <class T, class H, class Word>
struct LineCode {
  T scale() const { return *scale_at; }
  std::conditional_t<std::is_const_v<Word>, const T, T>* scale_at;
  Word* planes;
  std::conditional_t<std::is_const_v<Word>, const H, H>* hinges;

  LineCode(Word* words, const Lines& lines, size_t group) {
    scale_at = reinterpret_cast<decltype(scale_at)>(words) + group;
    planes = words + lines.before_planes<T>() + group * (Lines::group / 32) * static_cast<size_t>(lines.bits);
    hinges = reinterpret_cast<decltype(hinges)>(words + lines.before_hinges<T>()) + group * Lines::group;
  }
};

// The first entry of a group, and the first after it.
inline std::pair<size_t, size_t> entries_of(const Lines& lines, size_t group) {
  const size_t most = Lines::group * lines.block;
  return {group * most, std::min(lines.entries, (group + 1) * most)};
}

// Accumulate a group of blocks and write their code; whether nothing is too large.
struct EncodeGroup {
  template <Isa isa, class T, class G, class H>
  MPITOPK_INLINE static bool run(const G* gradient, const T* residual, T* out, size_t entries, const Lines& lines,
                                 const LineCode<T, H, std::uint32_t>& code) {
    Bits<T> top = 0;
    for (size_t i = 0; i < entries; ++i) {
      out[i] = residual[i] + widen<T>(gradient[i]);
      top = std::max(top, key_of(out[i]));
    }
    if (top >= Format<T>::too_large) return false;
    std::uint16_t numbers[Lines::group] = {};
    T products[Lines::group];
    Nearest::run<isa>(static_cast<const T*>(out), entries, lines, numbers, products);
    const size_t blocks = (entries + lines.block - 1) / lines.block;
    T scale = 0;
    for (size_t i = 0; i < blocks; ++i) scale = std::max(scale, std::abs(products[i]));
    *code.scale_at = scale;
    const auto bits = static_cast<size_t>(lines.bits);
    for (size_t i = 0; i < blocks; ++i) {
      for (size_t b = 0; b < bits; ++b) {
        code.planes[i / 32 * bits + b] |= static_cast<std::uint32_t>(numbers[i] >> b & 1) << (i % 32);
      }
    }
    const T most = static_cast<T>(lines.most());
    const T step = scale / most;
    for (size_t i = 0; i < blocks; ++i) {
      const T steps = scale > 0 ? std::nearbyint(products[i] / scale * most) : T{0};
      code.hinges[i] = static_cast<H>(steps);
      const T coefficient = steps * step;
      const float* vector = lines.vectors + numbers[i] * lines.block;
      const size_t size = std::min(lines.block, entries - i * lines.block);
      for (size_t j = 0; j < size; ++j) out[i * lines.block + j] -= coefficient * static_cast<T>(vector[j]);
    }
    return true;
  }
};

template <class T, class H, class G>
bool encode_lines(Pool& pool, Isa isa, const Lines& lines, const G* gradient, const T* residual, T* out,
                  std::uint32_t* words) {
  std::atomic<bool> sound{true};
  std::memset(words, 0, lines.words<T>() * sizeof *words);
  pool.each(pool.useful(lines.entries * lines.stride / 8), lines.groups(), [&](int, size_t group) {
    const auto [first, last] = entries_of(lines, group);
    const LineCode<T, H, std::uint32_t> code(words, lines, group);
    if (!run_on<EncodeGroup>(isa, gradient + first, residual + first, out + first, last - first, lines, code)) {
      sound = false;
    }
  });
  return sound;
}

// Add what the code of a group stands for.
struct AddGroup {
  template <Isa, class T, class H>
  MPITOPK_INLINE static void run(const LineCode<T, H, const std::uint32_t>& code, const Lines& lines, T* out,
                                 size_t entries) {
    const T step = code.scale() / static_cast<T>(lines.most());
    const auto bits = static_cast<size_t>(lines.bits);
    size_t i = 0;
    for (size_t start = 0; start < entries; start += lines.block, ++i) {
      size_t number = 0;
      for (size_t b = 0; b < bits; ++b) number |= size_t{code.planes[i / 32 * bits + b] >> (i % 32) & 1} << b;
      const T coefficient = static_cast<T>(code.hinges[i]) * step;
      const float* vector = lines.vectors + number * lines.block;
      const size_t size = std::min(lines.block, entries - start);
      for (size_t j = 0; j < size; ++j) out[start + j] += coefficient * static_cast<T>(vector[j]);
    }
  }
};

template <class T, class H>
void merge_lines(Pool& pool, Isa isa, const Lines& lines, const std::vector<const std::uint32_t*>& messages,
                 T divisor, T* out) {
  pool.each(pool.useful(lines.entries), lines.groups(), [&](int, size_t group) {
    const auto [first, last] = entries_of(lines, group);
    std::memset(out + first, 0, (last - first) * sizeof(T));
    for (const std::uint32_t* words : messages) {
      const LineCode<T, H, const std::uint32_t> code(words, lines, group);
      run_on<AddGroup>(isa, code, lines, out + first, last - first);
    }
    run_on<Divide>(isa, out + first, last - first, divisor);
  });
}

}  // namespace mpitopk
