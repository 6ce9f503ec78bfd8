// All entries from some magnitude on, and samples from which such a magnitude is estimated.
#pragma once

#include <bit>
#include <cstring>
#include <vector>

#include "elementwise.hpp"
#include "pack.hpp"
#include "random.hpp"

namespace mpitopk {

// Keep the entries of x[start, stop) of at least the magnitude `low`; beyond `most` they are only counted.
struct ScanAbove {
  template <Isa, class T>
  MPITOPK_INLINE static size_t run(const T* x, size_t start, size_t stop, Bits<T> low, size_t most, Found<T>& found) {
    size_t total = 0;
    for (size_t i = start; i < stop; i += block) {
      const size_t length = std::min(block, stop - i);
      Bits<T> largest = 0;
      if (length == block) {
        for (size_t j = 0; j < block; ++j) largest = std::max(largest, key_of(x[i + j]));
        if (largest < low) continue;
      }
      std::uint64_t mask = hits(x + i, length, low);
      total += static_cast<size_t>(std::popcount(mask));
      if (found.count > most) continue;
      found.make_room();
      for (; mask != 0; mask &= mask - 1) {
        const size_t at = i + static_cast<size_t>(std::countr_zero(mask));
        found.indices.data()[found.count] = static_cast<Index>(at);
        found.values.data()[found.count++] = x[at];
      }
    }
    return total;
  }
};

template <class T>
class Above {
 public:
  // Return how many entries of the parts there are; move them out if there are `least` to `most`.
  size_t move(Pool& pool, Isa isa, T* x, size_t size, const std::vector<Dense>& parts, Bits<T> low, size_t least,
              size_t most, Index* indices, T* values) {
    const int use = pool.useful(size);
    found_.resize(static_cast<size_t>(use));
    totals_.assign(static_cast<size_t>(use), 0);
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
      totals_[static_cast<size_t>(t)] = total;
    });
    size_t total = 0;
    for (size_t& mine : totals_) total += std::exchange(mine, total);
    if (total < least || total > most) return total;
    pool.run(use, [&](int t) {
      const Found<T>& found = found_[static_cast<size_t>(t)];
      if (found.count == 0) return;
      const size_t to = totals_[static_cast<size_t>(t)];
      std::memcpy(indices + to, found.indices.data(), found.count * sizeof(Index));
      std::memcpy(values + to, found.values.data(), found.count * sizeof(T));
      for (size_t i = 0; i < found.count; ++i) x[found.indices.data()[i]] = T{0};
    });
    return total;
  }

 private:
  std::vector<Found<T>> found_;
  std::vector<size_t> totals_;  // of each thread, and then of those before it
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

}  // namespace mpitopk
