// Eight floats at a time, for processors with AVX2.
#pragma once

#include <array>
#include <bit>

#include "isa.hpp"
#include "types.hpp"

#if MPITOPK_HAVE_AVX2

namespace mpitopk {

MPITOPK_AVX2_INLINE __m256 load_floats(const float* x) { return _mm256_loadu_ps(x); }

MPITOPK_AVX2_INLINE __m256 load_floats(const Half* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

MPITOPK_AVX2_INLINE __m256 load_floats(const Bfloat* x) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

MPITOPK_AVX2_INLINE bool any_above(__m256i keys, __m256i limit) {
  const __m256i above = _mm256_cmpgt_epi32(keys, limit);
  return !_mm256_testz_si256(above, above);
}

// For each set of lanes, which of them come first when the others are left out.
inline constexpr auto lanes_of_mask = [] {
  std::array<std::uint64_t, 256> table{};
  for (unsigned mask = 0; mask < 256; ++mask) {
    int to = 0;
    for (std::uint64_t lane = 0; lane < 8; ++lane) {
      if ((mask >> lane & 1) != 0) table[mask] |= lane << (8 * to++);
    }
  }
  return table;
}();

struct Kept {
  __m256i lanes;
  size_t count;
};

// The lanes whose sign bit is set, in order.
MPITOPK_AVX2_INLINE Kept compress(__m256i chosen) {
  const auto mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(chosen)));
  const auto lanes = _mm_cvtsi64_si128(static_cast<long long>(lanes_of_mask[mask]));
  return {_mm256_cvtepu8_epi32(lanes), static_cast<size_t>(std::popcount(mask))};
}

}  // namespace mpitopk

#endif
