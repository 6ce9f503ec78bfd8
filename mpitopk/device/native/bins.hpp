// Bins of consecutive entries, and which entries of each are chosen. Threads own stretches of bins.
#pragma once

#include <cmath>
#include <utility>

#include "elementwise.hpp"

namespace mpitopk {

// A segment of the buffer, and which bin is its first.
struct Binned {
  std::int64_t start, stop, first;
};

class Bins {
 public:
  Bins(const Binned* rows, size_t segments, size_t size) : rows_(rows), segments_(segments), size_(size) {}

  const Binned* rows() const { return rows_; }
  size_t segments() const { return segments_; }
  size_t size() const { return size_; }
  size_t mark_words() const { return (size_ + 31) / 32; }
  size_t entries() const { return segments_ == 0 ? 0 : static_cast<size_t>(rows_[segments_ - 1].stop); }
  size_t total() const { return segments_ == 0 ? 0 : first(segments_ - 1) + bins_of(segments_ - 1); }
  size_t first(size_t segment) const { return static_cast<size_t>(rows_[segment].first); }
  size_t bins_of(size_t segment) const {
    return (static_cast<size_t>(rows_[segment].stop - rows_[segment].start) + size_ - 1) / size_;
  }

  // Whether the segments follow one another without gaps, and so do their bins.
  bool sound() const {
    size_t at = 0, bins = 0;
    for (size_t s = 0; s < segments_; ++s) {
      if (static_cast<size_t>(rows_[s].start) != at || rows_[s].stop <= rows_[s].start || first(s) != bins) return false;
      at = static_cast<size_t>(rows_[s].stop);
      bins += bins_of(s);
    }
    return true;
  }

  // Call f(bin, segment, start, entries) for bins begin <= bin < end.
  template <class F>
  void each(size_t begin, size_t end, F&& f) const {
    const auto last = static_cast<std::int64_t>(begin);
    const Binned* row = std::upper_bound(rows_, rows_ + segments_, last,
                                         [](std::int64_t bin, const Binned& other) { return bin < other.first; });
    for (auto segment = static_cast<size_t>(row - rows_) - 1; begin < end; ++segment) {
      const auto stop = static_cast<size_t>(rows_[segment].stop);
      auto start = static_cast<size_t>(rows_[segment].start) + (begin - first(segment)) * size_;
      for (; start < stop && begin < end; start += size_) f(begin++, segment, start, std::min(size_, stop - start));
    }
  }

  // Call f(begin, end) for the bins of each thread.
  template <class F>
  void parts(Pool& pool, F&& f) const {
    const int use = pool.useful(entries());
    pool.run(use, [&](int t) {
      const auto [begin, end] = share(total(), t, use, 1);
      if (begin < end) f(begin, end);
    });
  }

 private:
  const Binned* rows_;
  const size_t segments_, size_;
};

template <class T>
struct Chosen {
  T most;
  size_t count;
};

#if MPITOPK_HAVE_AVX2
// Write the marks of the whole words of a bin; return how many those are.
template <class G>
MPITOPK_AVX2 size_t mark_words(const G* gradient, const float* residual, const float* out, size_t size, float factor,
                               float most, std::uint32_t* marks) {
  size_t word = 0;
  for (; size - 32 * word >= 32; ++word) {
    std::uint32_t bits = 0;
    for (size_t j = 0; j < 32; j += 8) {
      const size_t i = 32 * word + j;
      const __m256 step = _mm256_mul_ps(_mm256_set1_ps(factor), load_floats(gradient + i));
      const __m256 ahead = _mm256_add_ps(_mm256_loadu_ps(residual + i), step);
      const __m256 size_of = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), ahead);
      const __m256 enough = _mm256_cmp_ps(size_of, _mm256_set1_ps(most), _CMP_GE_OQ);
      const __m256 there = _mm256_cmp_ps(_mm256_loadu_ps(out + i), _mm256_setzero_ps(), _CMP_NEQ_UQ);
      bits |= static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_and_ps(enough, there))) << j;
    }
    marks[word] = bits;
  }
  return word;
}
#endif

// Accumulate the entries of a bin and mark which are chosen.
struct SelectBin {
  template <Isa isa, class T, class G>
  MPITOPK_INLINE static Chosen<T> run(const G* gradient, const T* residual, T* out, size_t size, T factor,
                                      std::uint32_t* marks, size_t words) {
    Bits<T> top = 0;
    for (size_t i = 0; i < size; ++i) {
      out[i] = residual[i] + widen<T>(gradient[i]);
      top = std::max(top, key_of(out[i]));
    }
    Chosen<T> chosen{std::bit_cast<T>(top), 0};
    size_t word = 0;
#if MPITOPK_HAVE_AVX2
    if constexpr (isa == Isa::avx2 && std::is_same_v<T, float>) {
      word = mark_words(gradient, residual, out, size, factor, chosen.most, marks);
    }
#endif
    for (; word < words; ++word) {
      std::uint32_t bits = 0;
      for (size_t i = 32 * word; i < std::min(size, 32 * word + 32); ++i) {
        const bool ahead = std::abs(residual[i] + factor * widen<T>(gradient[i])) >= chosen.most;
        bits |= static_cast<std::uint32_t>(ahead & (out[i] != 0)) << (i % 32);
      }
      marks[word] = bits;
    }
    for (word = 0; word < words; ++word) chosen.count += static_cast<size_t>(std::popcount(marks[word]));
    return chosen;
  }
};

// The mean from 256 sums of every 256th, added up by halves.
template <class T>
T mean_of(const T* x, size_t size) {
  constexpr size_t lanes = 256;
  double sums[lanes] = {};
  for (size_t i = 0; i < size; i += lanes) {
    const size_t width = std::min(lanes, size - i);
    for (size_t j = 0; j < width; ++j) sums[j] += static_cast<double>(x[i + j]);
  }
  for (size_t half = lanes / 2; half > 0; half /= 2) {
    for (size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return static_cast<T>(sums[0] / static_cast<double>(size));
}

// How many entries are chosen; -1 if something is too large. `most` is scratch for a number of each bin.
template <class T, class G, class C>
std::ptrdiff_t select_bins(Pool& pool, Isa isa, const Bins& bins, const G* gradient, const T* residual, T* out,
                           T factor, std::uint32_t* marks, C* counts, T* scales, T* most) {
  std::atomic<size_t> entries{0};
  std::atomic<bool> sound{true};
  bins.parts(pool, [&](size_t begin, size_t end) {
    size_t mine = 0;
    Bits<T> top = 0;
    bins.each(begin, end, [&](size_t bin, size_t, size_t start, size_t size) {
      const auto chosen = run_on<SelectBin>(isa, gradient + start, residual + start, out + start, size, factor,
                                            marks + bin * bins.mark_words(), bins.mark_words());
      most[bin] = chosen.most;
      counts[bin] = static_cast<C>(chosen.count);
      mine += chosen.count;
      top = std::max(top, bits_of(chosen.most));
    });
    entries += mine;
    if (top >= Format<T>::too_large) sound = false;
  });
  if (!sound) return -1;
  for (size_t s = 0; s < bins.segments(); ++s) {
    scales[s] = mean_of(most + bins.first(s), bins.bins_of(s));
  }
  return static_cast<std::ptrdiff_t>(entries);
}

}  // namespace mpitopk
