// Bins of consecutive entries: which entries of each are chosen, the code in which those travel, and the sum
// of the codes of all ranks. Threads own stretches of bins.
#pragma once

#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

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

// Accumulate the entries of a bin and mark which are chosen.
struct SelectBin {
  template <Isa, class T, class G>
  MPITOPK_INLINE static Chosen<T> run(const G* gradient, const T* residual, T* out, size_t size, T factor,
                                      std::uint32_t* marks, size_t words) {
    Bits<T> top = 0;
    for (size_t i = 0; i < size; ++i) {
      out[i] = residual[i] + widen<T>(gradient[i]);
      top = std::max(top, key_of(out[i]));
    }
    Chosen<T> chosen{std::bit_cast<T>(top), 0};
    for (size_t first = 0; first < 32 * words; first += 32) {
      const size_t width = first < size ? std::min<size_t>(32, size - first) : 0;
      std::uint32_t hits[32];
      std::uint32_t any = 0;
      for (size_t j = 0; j < width; ++j) {
        const size_t i = first + j;
        const T ahead = residual[i] + factor * widen<T>(gradient[i]);
        hits[j] = static_cast<std::uint32_t>(std::abs(ahead) >= chosen.most) & static_cast<std::uint32_t>(out[i] != 0);
        any |= hits[j];
      }
      std::uint32_t bits = 0;
      if (any != 0) {
        for (size_t j = 0; j < width; ++j) bits |= hits[j] << j;
      }
      *marks++ = bits;
      chosen.count += static_cast<size_t>(std::popcount(bits));
    }
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

  static size_t place(E entry) { return entry & ((size_t{1} << bits) - 1); }
  static bool negative(E entry) { return entry >> bits != 0; }
};

template <class T, class C, class E>
void pack_bins(Pool& pool, const Bins& bins, T* x, const std::uint32_t* marks, const C* counts, const T* scales,
               std::uint32_t* words, size_t n_words) {
  using Code = BinCode<T, C, E>;
  const Code code(words, bins);
  std::memset(words, 0, n_words * sizeof *words);
  std::memcpy(const_cast<T*>(code.scales), scales, bins.segments() * sizeof(T));
  std::memcpy(const_cast<C*>(code.counts), counts, bins.total() * sizeof(C));
  bins.parts(pool, [&](size_t begin, size_t end) {
    E* to = const_cast<E*>(code.entries) + std::accumulate(counts, counts + begin, size_t{0});
    bins.each(begin, end, [&](size_t bin, size_t segment, size_t start, size_t) {
      for (size_t word = 0; counts[bin] != 0 && word < bins.mark_words(); ++word) {
        for (std::uint32_t rest = marks[bin * bins.mark_words() + word]; rest != 0; rest &= rest - 1) {
          const size_t place = 32 * word + static_cast<size_t>(std::countr_zero(rest));
          const bool negative = x[start + place] < 0;
          *to++ = static_cast<E>(place | static_cast<size_t>(negative) << Code::bits);
          x[start + place] -= negative ? -scales[segment] : scales[segment];
        }
      }
    });
  });
}

struct Words {
  const std::uint32_t* at;
  size_t count;
};

// How many entries some message holds, or -1 - p where that of rank p is the first that is not such code.
template <class T, class C, class E>
std::ptrdiff_t merge_bins(Pool& pool, const Bins& bins, const std::vector<Words>& messages, T divisor, T* out) {
  using Code = BinCode<T, C, E>;
  std::vector<Code> codes;
  for (const Words& words : messages) codes.emplace_back(words.at, bins);
  std::vector<char> wrong(messages.size());
  pool.each(pool.useful(bins.entries()), messages.size(), [&](int, size_t p) {
    const Code& code = codes[p];
    wrong[p] = true;
    if (messages[p].count < Code::words_of(bins, 0)) return;
    const size_t entries = std::accumulate(code.counts, code.counts + bins.total(), size_t{0});
    if (messages[p].count != Code::words_of(bins, entries)) return;
    bool bad = false;
    const E* entry = code.entries;
    bins.each(0, bins.total(), [&](size_t bin, size_t, size_t, size_t size) {
      size_t least = 0;
      bad |= code.counts[bin] > size;
      for (const E* end = entry + code.counts[bin]; entry != end; ++entry) {
        bad |= Code::place(*entry) < least || Code::place(*entry) >= size;
        least = Code::place(*entry) + 1;
      }
    });
    wrong[p] = bad;
  });
  const auto first = std::find(wrong.begin(), wrong.end(), true);
  if (first != wrong.end()) return -1 - (first - wrong.begin());

  std::atomic<size_t> held{0};
  bins.parts(pool, [&](size_t begin, size_t end) {
    std::vector<const E*> next;
    for (const Code& code : codes) {
      next.push_back(code.entries + std::accumulate(code.counts, code.counts + begin, size_t{0}));
    }
    std::vector<std::uint32_t> marks(bins.mark_words());
    size_t mine = 0;
    bins.each(begin, end, [&](size_t bin, size_t segment, size_t start, size_t size) {
      T* to = out + start;
      std::memset(to, 0, size * sizeof(T));
      for (size_t p = 0; p < codes.size(); ++p) {
        const T scale = codes[p].scales[segment];
        for (const E* last = next[p] + codes[p].counts[bin]; next[p] != last; ++next[p]) {
          const size_t place = Code::place(*next[p]);
          to[place] += Code::negative(*next[p]) ? -scale : scale;
          marks[place / 32] |= std::uint32_t{1} << (place % 32);
        }
      }
      for (size_t word = 0; word < marks.size(); ++word) {
        for (std::uint32_t rest = std::exchange(marks[word], 0); rest != 0; rest &= rest - 1) {
          to[32 * word + static_cast<size_t>(std::countr_zero(rest))] /= divisor;
          ++mine;
        }
      }
    });
    held += mine;
  });
  return static_cast<std::ptrdiff_t>(held);
}

}  // namespace mpitopk
