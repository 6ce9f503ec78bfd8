// The code in which the chosen entries of bins travel, and the sum of the codes of all ranks.
#pragma once

#include <cstring>
#include <numeric>
#include <vector>

#include "bins.hpp"
#include "lanes.hpp"

namespace mpitopk {

// The parts of words of code. C: type of a count, E: of an entry.
template <class T, class C, class E>
struct BinCode {
  static constexpr int bits = 8 * sizeof(E) - 1;

  const T* scales;
  const C* counts;
  const E* entries;

  BinCode(const std::uint32_t* words, const Bins& bins) {
    const auto* at = reinterpret_cast<const std::uint8_t*>(words);
    scales = reinterpret_cast<const T*>(at);
    counts = reinterpret_cast<const C*>(scales + bins.segments());
    entries = reinterpret_cast<const E*>(at + 4 * words_of(bins, 0));
  }

  static size_t words_of(const Bins& bins, size_t entries) {
    const size_t before = (bins.segments() * sizeof(T) + bins.total() * sizeof(C) + 3) / 4;
    return before + (entries * sizeof(E) + 3) / 4;
  }

  // The first entry of a bin.
  const E* entry(size_t bin) const { return entries + std::accumulate(counts, counts + bin, size_t{0}); }

  static size_t place(E entry) { return entry & ((size_t{1} << bits) - 1); }
  static bool negative(E entry) { return entry >> bits != 0; }
};

#if MPITOPK_HAVE_AVX2
// Eight entries, the mask of those that are chosen, and the place in the bin of the first: append their code,
// and subtract what it stands for. What is written to `to` goes beyond their code, up to that of eight.
template <class E>
MPITOPK_AVX2_INLINE E* pack_eight(float* x, unsigned mask, size_t place, float scale, E* to) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i chosen = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask)), lane), lane);
  const __m256 old = _mm256_loadu_ps(x);
  const __m256 negative = _mm256_cmp_ps(old, _mm256_setzero_ps(), _CMP_LT_OQ);
  const __m256 sign = _mm256_and_ps(negative, _mm256_set1_ps(-0.0f));
  const __m256 left = _mm256_sub_ps(old, _mm256_xor_ps(_mm256_set1_ps(scale), sign));
  _mm256_storeu_ps(x, _mm256_blendv_ps(old, left, _mm256_castsi256_ps(chosen)));

  const __m256i below = _mm256_castps_si256(negative);
  __m128i code = _mm_packs_epi32(_mm256_castsi256_si128(below), _mm256_extracti128_si256(below, 1));
  __m128i order = _mm_cvtsi64_si128(static_cast<long long>(lanes_of_mask[mask]));
  const __m128i iota = _mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7);
  const __m128i places = _mm_add_epi16(_mm_set1_epi16(static_cast<short>(place)), iota);
  if constexpr (sizeof(E) == 1) {
    code = _mm_or_si128(places, _mm_and_si128(code, _mm_set1_epi16(0x80)));
    const __m128i bytes = _mm_shuffle_epi8(_mm_packus_epi16(code, code), order);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), bytes);
  } else {
    code = _mm_or_si128(places, _mm_slli_epi16(code, 15));
    order = _mm_add_epi16(_mm_mullo_epi16(_mm_cvtepu8_epi16(order), _mm_set1_epi16(0x202)), _mm_set1_epi16(0x100));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(code, order));
  }
  return to + std::popcount(mask);
}

// Append the code of the first words of marks of a bin, as long as there are 32 entries, and room for eight
// before the end; return how many words those are.
template <class E>
MPITOPK_AVX2 size_t pack_words(float* x, size_t size, const std::uint32_t* marks, float scale, E*& to, const E* end) {
  size_t word = 0;
  for (; size - 32 * word >= 32 && end - to >= 32; ++word) {
    for (size_t j = 0; j < 32 && marks[word] >> j != 0; j += 8) {
      const unsigned mask = marks[word] >> j & 255;
      const size_t place = 32 * word + j;
      if (mask != 0) to = pack_eight(x + place, mask, place, scale, to);
    }
  }
  return word;
}
#endif

// Append the code of what is chosen of a bin to `to`, which has room until `end`.
struct PackBin {
  template <Isa isa, class T, class E>
  MPITOPK_INLINE static E* run(T* x, size_t size, const std::uint32_t* marks, T scale, E* to, const E* end) {
    size_t word = 0;
#if MPITOPK_HAVE_AVX2
    if constexpr (isa == Isa::avx2 && std::is_same_v<T, float>) word = pack_words(x, size, marks, scale, to, end);
#endif
    for (; 32 * word < size; ++word) {
      for (std::uint32_t rest = marks[word]; rest != 0; rest &= rest - 1) {
        const size_t place = 32 * word + static_cast<size_t>(std::countr_zero(rest));
        const bool negative = x[place] < 0;
        *to++ = static_cast<E>(place | static_cast<size_t>(negative) << (8 * sizeof(E) - 1));
        x[place] -= negative ? -scale : scale;
      }
    }
    return to;
  }
};

template <class T, class C, class E>
void pack_bins(Pool& pool, Isa isa, const Bins& bins, T* x, const std::uint32_t* marks, const C* counts,
               const T* scales, std::uint32_t* words, size_t n_words) {
  const BinCode<T, C, E> code(words, bins);
  const size_t before = BinCode<T, C, E>::words_of(bins, 0);
  if (before > 0) words[before - 1] = words[n_words - 1] = 0;  // for what pads
  std::memcpy(const_cast<T*>(code.scales), scales, bins.segments() * sizeof(T));
  std::memcpy(const_cast<C*>(code.counts), counts, bins.total() * sizeof(C));
  bins.parts(pool, [&](size_t begin, size_t end) {
    E* to = const_cast<E*>(code.entries) + std::accumulate(counts, counts + begin, size_t{0});
    const E* last = std::accumulate(counts + begin, counts + end, size_t{0}) + to;
    bins.each(begin, end, [&](size_t bin, size_t segment, size_t start, size_t size) {
      if (counts[bin] == 0) return;
      to = run_on<PackBin>(isa, x + start, size, marks + bin * bins.mark_words(), scales[segment], to, last);
    });
  });
}

struct Words {
  const std::uint32_t* at;
  size_t count;
};

// Whether the entries of a bin are in order and range.
struct InOrder {
  template <Isa, class E>
  MPITOPK_INLINE static bool run(const E* entries, size_t count, size_t size) {
    constexpr E place = static_cast<E>(~E{0}) >> 1;
    bool wrong = (entries[count - 1] & place) >= size;
    for (size_t i = 1; i < count; ++i) wrong |= (entries[i] & place) <= (entries[i - 1] & place);
    return !wrong;
  }
};

// Sums that no entry has come to are -0, which no sum is. Make means of them all; return how many are sums.
struct Means {
  template <Isa, class T>
  MPITOPK_INLINE static size_t run(T* x, size_t size, T divisor) {
    Bits<T> sums = 0;
    for (size_t i = 0; i < size; ++i) {
      const bool sum = bits_of(x[i]) != Format<T>::none;
      x[i] = std::bit_cast<T>(static_cast<Bits<T>>(bits_of(x[i] / divisor) & (Bits<T>{0} - sum)));  // no branch
      sums += sum;
    }
    return static_cast<size_t>(sums);
  }
};

// The first message that is not such code, or how many there are.
template <class T, class C, class E>
size_t first_wrong(Pool& pool, Isa isa, const Bins& bins, const std::vector<Words>& messages,
                   const std::vector<BinCode<T, C, E>>& codes) {
  size_t sound = 0;  // as many as have the right length
  for (; sound < messages.size(); ++sound) {
    if (messages[sound].count < BinCode<T, C, E>::words_of(bins, 0)) break;
    const C* counts = codes[sound].counts;
    const size_t entries = std::accumulate(counts, counts + bins.total(), size_t{0});
    if (messages[sound].count != BinCode<T, C, E>::words_of(bins, entries)) break;
  }
  std::atomic<size_t> first{sound};
  bins.parts(pool, [&](size_t begin, size_t end) {
    for (size_t p = 0; p < sound; ++p) {
      bool right = true;
      const E* entry = codes[p].entry(begin);
      bins.each(begin, end, [&](size_t bin, size_t, size_t, size_t size) {
        const size_t count = codes[p].counts[bin];
        right &= count <= size && (count == 0 || run_on<InOrder>(isa, entry, count, size));
        entry += count;
      });
      size_t seen = first;
      while (!right && p < seen && !first.compare_exchange_weak(seen, p)) {
      }
    }
  });
  return first;
}

// How many entries some message holds, or -1 - p where that of rank p is the first that is not such code.
template <class T, class C, class E>
std::ptrdiff_t merge_bins(Pool& pool, Isa isa, const Bins& bins, const std::vector<Words>& messages, T divisor,
                          T* out) {
  using Code = BinCode<T, C, E>;
  constexpr size_t lag = 16384 / sizeof(T);  // half of the nearest cache
  std::vector<Code> codes;
  for (const Words& words : messages) codes.emplace_back(words.at, bins);
  const size_t wrong = first_wrong(pool, isa, bins, messages, codes);
  if (wrong < messages.size()) return -1 - static_cast<std::ptrdiff_t>(wrong);

  std::atomic<size_t> held{0};
  bins.parts(pool, [&](size_t begin, size_t end) {
    std::vector<const E*> next;
    for (const Code& code : codes) next.push_back(code.entry(begin));
    size_t mine = 0, summed = 0, first = 0;
    const auto settle = [&](size_t stop) {
      mine += run_on<Means>(isa, out + first, stop - first, divisor);
      first = stop;
    };
    bins.each(begin, end, [&](size_t bin, size_t segment, size_t start, size_t size) {
      // Many bins at once: reading what was just written in smaller parts stalls.
      if (bin == begin) first = start;
      if (start - first > lag) settle(start);
      T* to = out + start;
      std::fill_n(to, size, -T{0});
      for (size_t p = 0; p < codes.size(); ++p) {
        const T scale = codes[p].scales[segment];
        const T values[] = {T{0} + scale, scale == 0 ? T{0} : -scale};  // no -0
        const E* last = next[p] + codes[p].counts[bin];
        for (const E* entry = next[p]; entry != last; ++entry) to[Code::place(*entry)] += values[Code::negative(*entry)];
        next[p] = last;
      }
      summed = start + size;
    });
    settle(summed);
    held += mine;
  });
  return static_cast<std::ptrdiff_t>(held);
}

}  // namespace mpitopk
