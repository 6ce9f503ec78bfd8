// Which of a few vectors has the largest |product| with each of many blocks of entries.
#pragma once

#include <cmath>

#include "elementwise.hpp"

namespace mpitopk {

constexpr size_t longest = 64;  // entries of a block
constexpr size_t together = 8;  // blocks looked at at once

// For each of 8 rows, the first of `count` vectors with the largest |product|, and that product: it is summed from 0
// in the order of entries.
struct Nearest {
  template <Isa isa, class T>
  MPITOPK_INLINE static void run(const T* const* rows, size_t block, const float* vectors, size_t count,
                                 std::uint32_t* numbers, T* products) {
    if constexpr (isa == Isa::avx2 && std::is_same_v<T, float>) {
      lanes(rows, block, vectors, count, numbers, products);
    } else {
      for (size_t i = 0; i < together; ++i) {
        T most = -1;
        for (size_t k = 0; k < count; ++k) {
          T sum = 0;
          for (size_t j = 0; j < block; ++j) sum += rows[i][j] * static_cast<T>(vectors[k * block + j]);
          if (std::abs(sum) > most) {
            most = std::abs(sum);
            numbers[i] = static_cast<std::uint32_t>(k);
            products[i] = sum;
          }
        }
      }
    }
  }

 private:
#if MPITOPK_HAVE_AVX2
  // A lane for each row.
  MPITOPK_AVX2 static void lanes(const float* const* rows, size_t block, const float* vectors, size_t count,
                                 std::uint32_t* numbers, float* products) {
    __m256 x[longest];
    for (size_t j = 0; j < block; j += 8) transpose(rows, j, std::min<size_t>(8, block - j), x + j);
    Best best{_mm256_set1_ps(-1.0f), _mm256_setzero_ps(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    size_t k = 0;
    for (; k + 8 <= count; k += 8) look<8>(x, block, vectors + k * block, best);
    for (; k < count; ++k) look<1>(x, block, vectors + k * block, best);
    _mm256_storeu_ps(products, best.product);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers), best.number);
  }

  struct Best {
    __m256 size, product;
    __m256i number, next;
  };

  // Several vectors at once, since each sum has to wait for itself.
  template <size_t several>
  MPITOPK_AVX2_INLINE static void look(const __m256* x, size_t block, const float* vectors, Best& best) {
    __m256 sums[several];
    for (size_t q = 0; q < several; ++q) sums[q] = _mm256_setzero_ps();
#pragma GCC unroll 1
    for (size_t j = 0; j < block; ++j) {
      for (size_t q = 0; q < several; ++q) {
        sums[q] = _mm256_add_ps(sums[q], _mm256_mul_ps(x[j], _mm256_broadcast_ss(vectors + q * block + j)));
      }
    }
    for (size_t q = 0; q < several; ++q) {
      const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), sums[q]);
      const __m256 above = _mm256_cmp_ps(size, best.size, _CMP_GT_OQ);
      best.size = _mm256_max_ps(best.size, size);
      best.product = _mm256_blendv_ps(best.product, sums[q], above);
      best.number = _mm256_blendv_epi8(best.number, best.next, _mm256_castps_si256(above));
      best.next = _mm256_add_epi32(best.next, _mm256_set1_epi32(1));
    }
  }

  // Entries j, j + 1, ... j + width - 1 of each row to as many registers.
  MPITOPK_AVX2 static void transpose(const float* const* rows, size_t j, size_t width, __m256* x) {
    if (width < 8) {
      for (size_t k = 0; k < width; ++k) {
        float column[together];
        for (size_t i = 0; i < together; ++i) column[i] = rows[i][j + k];
        x[k] = _mm256_loadu_ps(column);
      }
      return;
    }
    __m256 pairs[8], fours[8];
    for (size_t i = 0; i < 4; ++i) {  // rows i and i + 4 side by side, of which each has a half
      const __m128 low = _mm_loadu_ps(rows[i] + j), high = _mm_loadu_ps(rows[i] + j + 4);
      pairs[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(low), _mm_loadu_ps(rows[i + 4] + j), 1);
      pairs[i + 4] = _mm256_insertf128_ps(_mm256_castps128_ps256(high), _mm_loadu_ps(rows[i + 4] + j + 4), 1);
    }
    for (size_t half = 0; half < 8; half += 4) {
      fours[half] = _mm256_unpacklo_ps(pairs[half], pairs[half + 1]);
      fours[half + 1] = _mm256_unpackhi_ps(pairs[half], pairs[half + 1]);
      fours[half + 2] = _mm256_unpacklo_ps(pairs[half + 2], pairs[half + 3]);
      fours[half + 3] = _mm256_unpackhi_ps(pairs[half + 2], pairs[half + 3]);
      x[half] = _mm256_shuffle_ps(fours[half], fours[half + 2], 0x44);
      x[half + 1] = _mm256_shuffle_ps(fours[half], fours[half + 2], 0xee);
      x[half + 2] = _mm256_shuffle_ps(fours[half + 1], fours[half + 3], 0x44);
      x[half + 3] = _mm256_shuffle_ps(fours[half + 1], fours[half + 3], 0xee);
    }
  }
#else
  static void lanes(const float* const*, size_t, const float*, size_t, std::uint32_t*, float*) {}
#endif
};

}  // namespace mpitopk
