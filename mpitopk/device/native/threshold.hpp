// All entries from some magnitude on, and samples from which such a magnitude is estimated.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <vector>

#include "elementwise.hpp"
#include "pack.hpp"
#include "random.hpp"

namespace mpitopk {

// Copy one entry out of each of `count` equal parts of the `size` entries of all parts of the buffer.
template <class T>
void sample(Pool& pool, const T* x, const std::vector<Dense>& parts, size_t size, std::uint64_t key, T* out,
            size_t count) {
  for_parts(pool, count, [&](size_t first, size_t mine) {
    auto part = parts.begin();
    size_t before = 0;  // entries of earlier parts
    for (std::uint64_t i = first; i < first + mine; ++i) {
      const std::uint64_t inside = ((i * size % count) << 31) + (splitmix64(key + i) >> 33) * size;
      const size_t position = i * size / count + inside / (std::uint64_t{count} << 31);
      for (; position - before >= static_cast<size_t>(part->stop - part->start); ++part) {
        before += static_cast<size_t>(part->stop - part->start);
      }
      out[i] = x[static_cast<size_t>(part->start) + position - before];
    }
  });
}

// Keep the entries of a block that begins at entry i, if not more than `most` are there yet; return how many.
template <class T>
MPITOPK_INLINE size_t keep_hits(const T* x, size_t i, std::uint64_t mask, size_t most, Found<T>& found) {
  const auto count = static_cast<size_t>(std::popcount(mask));
  if (count == 0 || found.count > most) return count;
  found.make_room();
  for (; mask != 0; mask &= mask - 1) {
    const size_t at = i + static_cast<size_t>(std::countr_zero(mask));
    found.indices.data()[found.count] = static_cast<Index>(at);
    found.values.data()[found.count++] = x[at];
  }
  return count;
}

#if MPITOPK_HAVE_AVX2
// Do this for whole blocks from `start` on, and move it to what is left.
MPITOPK_AVX2 inline size_t scan_above(const float* x, size_t& start, size_t stop, Bits<float> low, size_t most,
                                      Found<float>& found) {
  const __m256i magnitude = _mm256_set1_epi32(static_cast<int>(Format<float>::magnitude));
  const __m256i limit = just_below(low);
  size_t total = 0;
  for (; stop - start >= block; start += block) {
    std::uint64_t mask = 0;
    for (size_t j = 0; j < block; j += 8) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + start + j));
      const __m256i above = _mm256_cmpgt_epi32(_mm256_and_si256(bits, magnitude), limit);
      const auto lanes = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(above)));
      mask |= static_cast<std::uint64_t>(lanes) << j;
    }
    total += keep_hits(x, start, mask, most, found);
  }
  return total;
}
#endif

// Keep the entries of x[start, stop) of at least the magnitude `low`; beyond `most` they are only counted.
struct ScanAbove {
  template <Isa isa, class T>
  MPITOPK_INLINE static size_t run(const T* x, size_t start, size_t stop, Bits<T> low, size_t most, Found<T>& found) {
    size_t total = 0;
#if MPITOPK_HAVE_AVX2
    if constexpr (isa == Isa::avx2 && std::is_same_v<T, float>) total = scan_above(x, start, stop, low, most, found);
#endif
    for (size_t i = start; i < stop; i += block) {
      const size_t length = std::min(block, stop - i);
      Bits<T> largest = 0;
      if (length == block) {
        for (size_t j = 0; j < block; ++j) largest = std::max(largest, key_of(x[i + j]));
        if (largest < low) continue;
      }
      total += keep_hits(x, i, hits(x + i, length, low), most, found);
    }
    return total;
  }
};

struct CountAbove {
  template <Isa, class T>
  MPITOPK_INLINE static size_t run(const T* x, size_t size, Bits<T> low) {
    Bits<T> count = 0;  // fewer than 2^32
    for (size_t i = 0; i < size; ++i) count += key_of(x[i]) >= low;
    return static_cast<size_t>(count);
  }
};

template <class T>
class Above {
 public:
  // Return how many entries of the parts there are; move them out if there are `least` to `most`.
  size_t move(Pool& pool, Isa isa, T* x, size_t size, const std::vector<Dense>& parts, Bits<T> low, size_t least,
              size_t most, Index* indices, T* values) {
    gather(pool, isa, x, size, parts, low, most);
    if (total_ >= least && total_ <= most) take(pool, isa, x, low, indices, values);
    return total_;
  }

  // Look for a threshold from which on there are `least` to `most`, as a device's `search_above`; return how many
  // are moved out. What a sample says about the threshold only saves passes.
  size_t search(Pool& pool, Isa isa, T* x, size_t size, const std::vector<Dense>& parts, double threshold,
                size_t least, size_t most, int rounds, Index* indices, T* values) {
    const size_t room = 2 * most + 1024;
    Bits<T> low = probably_exceeded(pool, x, parts, most);
    gather(pool, isa, x, size, parts, low, room);
    double too_low = 0, too_high = std::numeric_limits<double>::infinity();
    for (; rounds > 0; --rounds) {
      const Bits<T> key = key_of(static_cast<T>(threshold));
      if (key < low ? total_ <= most : !complete(room)) {
        low = key;
        gather(pool, isa, x, size, parts, low, room);
      }
      const size_t count = key <= low ? total_ : count_above(pool, isa, key);
      if (count >= least && count <= most) {
        take(pool, isa, x, key, indices, values);
        return count;
      }
      (count > most ? too_low : too_high) = threshold;
      if (too_low == 0) {
        threshold = too_high / 2;
      } else {
        threshold = std::isinf(too_high) ? 1.5 * too_low : too_low * std::sqrt(too_high / too_low);
      }
    }
    return 0;
  }

 private:
  // Find what is above, up to somewhat more than `most` of each thread, and count all.
  void gather(Pool& pool, Isa isa, const T* x, size_t size, const std::vector<Dense>& parts, Bits<T> low,
              size_t most) {
    const int use = pool.useful(size);
    found_.resize(static_cast<size_t>(use));
    counts_.assign(static_cast<size_t>(use), 0);
    pool.run(use, [&](int t) {
      const auto [first, last] = share(size, t, use, block);
      Found<T>& found = found_[static_cast<size_t>(t)];
      found.count = 0;
      size_t total = 0;
      for (const Dense& part : parts) {
        const size_t start = std::max(first, static_cast<size_t>(part.start));
        const size_t stop = std::min(last, static_cast<size_t>(part.stop));
        if (start < stop) total += run_on<ScanAbove>(isa, x, start, stop, low, most, found);
      }
      counts_[static_cast<size_t>(t)] = total;
    });
    total_ = std::accumulate(counts_.begin(), counts_.end(), size_t{0});
  }

  // Whether all that is above was kept.
  bool complete(size_t most) const {
    return std::all_of(found_.begin(), found_.end(), [&](const Found<T>& found) { return found.count <= most; });
  }

  // How many of what was found are above.
  size_t count_above(Pool& pool, Isa isa, Bits<T> low) {
    const int use = static_cast<int>(found_.size());
    pool.run(use, [&](int t) {
      const Found<T>& found = found_[static_cast<size_t>(t)];
      counts_[static_cast<size_t>(t)] = run_on<CountAbove>(isa, found.values.data(), found.count, low);
    });
    return std::accumulate(counts_.begin(), counts_.end(), size_t{0});
  }

  // Move out what is above, of what was found.
  void take(Pool& pool, Isa isa, T* x, Bits<T> low, Index* indices, T* values) {
    count_above(pool, isa, low);
    std::exclusive_scan(counts_.begin(), counts_.end(), counts_.begin(), size_t{0});
    pool.run(static_cast<int>(found_.size()), [&](int t) {
      const Found<T>& found = found_[static_cast<size_t>(t)];
      size_t to = counts_[static_cast<size_t>(t)];
      for (size_t i = 0; i < found.count; ++i) {
        const Index at = found.indices.data()[i];
        if (key_of(found.values.data()[i]) < low) continue;
        indices[to] = at;
        values[to++] = found.values.data()[i];
        x[at] = T{0};
      }
    });
  }

  // A magnitude that more than `count` entries have, by a sample.
  Bits<T> probably_exceeded(Pool& pool, const T* x, const std::vector<Dense>& parts, size_t count) {
    constexpr size_t most = 32768;
    size_t size = 0;
    for (const Dense& part : parts) size += static_cast<size_t>(part.stop - part.start);
    const size_t looked_at = std::min(size / 8, most);
    const double rank = static_cast<double>(count) / static_cast<double>(size) * static_cast<double>(looked_at);
    const double place = rank + 5 * std::sqrt(rank) + 3;
    if (!(place < static_cast<double>(looked_at))) return 0;
    T* values = sample_.reserve(looked_at);
    sample(pool, x, parts, size, 0, values, looked_at);
    const std::array<Stretch<T>, 1> all{{{values, looked_at}}};
    return kth_largest(all, static_cast<size_t>(place), scratch_);
  }

  std::vector<Found<T>> found_;
  std::vector<size_t> counts_;  // of each thread
  size_t total_ = 0;
  Buffer<T> sample_;
  KthScratch<T> scratch_;
};

// Write where the largest magnitude of each chunk of the `size` entries of the parts is, the first of equal
// ones; return where the next goes.
template <class T>
Index* chunk_maxima(Pool& pool, const T* x, const std::vector<Dense>& parts, size_t size, size_t chunk, Index* out) {
  const size_t count = (size + chunk - 1) / chunk;
  const int use = std::min(pool.useful(size), static_cast<int>(std::min<size_t>(count, 1024)));
  pool.run(use, [&](int t) {
    const auto [first, last] = share(count, t, use, 1);
    auto part = parts.begin();
    size_t before = 0;  // entries of earlier parts
    for (size_t c = first; c < last; ++c) {
      const size_t stop = std::min(size, (c + 1) * chunk);
      Bits<T> most = 0;
      size_t best = 0;
      bool any = false;
      for (size_t position = c * chunk; position < stop;) {
        const auto length = static_cast<size_t>(part->stop - part->start);
        if (position >= before + length) {
          before += length;
          ++part;
          continue;
        }
        const size_t here = static_cast<size_t>(part->start) + position - before;
        const size_t run = std::min(stop, before + length) - position;
        for (size_t i = here; i < here + run; ++i) {
          const Bits<T> key = key_of(x[i]);
          if (any && key <= most) continue;
          any = true;
          most = key;
          best = i;
        }
        position += run;
      }
      out[c] = static_cast<Index>(best);
    }
  });
  return out + count;
}

}  // namespace mpitopk
