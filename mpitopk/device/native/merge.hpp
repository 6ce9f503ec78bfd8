// The sum of sparse messages, tile by tile: each thread owns stretches of the result and adds what the
// ranks sent in their order, so that no addition depends on the number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <vector>

#include "pack.hpp"

namespace mpitopk {

constexpr size_t header_bytes = 40;
constexpr size_t tile = 16384;

template <class W>
struct Incoming {
  const Index* indices;
  const W* values;
  size_t count;

  Incoming(const std::uint8_t* message, size_t n)
      : indices(reinterpret_cast<const Index*>(message + header_bytes)),
        values(reinterpret_cast<const W*>(message + header_bytes + ((n * sizeof(Index) + 7) & ~size_t{7}))),
        count(n) {}
};

struct Ascending {
  template <Isa>
  MPITOPK_INLINE static bool run(const Index* x, size_t count) {
    bool wrong = false;
    for (size_t i = 1; i < count; ++i) wrong |= x[i] <= x[i - 1];
    return !wrong;
  }
};

template <class T, class W>
class Merge {
 public:
  Merge(Pool& pool, Isa isa, const std::vector<Incoming<W>>& messages, const std::vector<Dense>& dense,
        T divisor, size_t size)
      : pool_(pool), isa_(isa), messages_(messages), dense_(dense), divisor_(divisor), size_(size) {}

  // -1, or the first rank whose indices are out of order or range.
  std::ptrdiff_t corrupt() const {
    const auto none = static_cast<std::ptrdiff_t>(messages_.size());
    std::atomic<std::ptrdiff_t> first{none};
    pool_.each(pool_.useful(total()), messages_.size(), [&](int, size_t p) {
      const Incoming<W>& message = messages_[p];
      if (message.count == 0) return;
      const bool inside = message.indices[message.count - 1] < size_;
      if (inside && run_on<Ascending>(isa_, message.indices, message.count)) return;
      auto seen = first.load();
      while (static_cast<std::ptrdiff_t>(p) < seen &&
             !first.compare_exchange_weak(seen, static_cast<std::ptrdiff_t>(p))) {
      }
    });
    return first.load() == none ? -1 : first.load();
  }

  // How many entries a sparse result may have.
  size_t room() const {
    size_t most = total();
    for (const Dense& piece : dense_) most += static_cast<size_t>(piece.stop - piece.start);
    return std::min(most, size_);
  }

  // Write the whole result; return how many entries some message holds.
  size_t to_dense(T* out) const {
    std::atomic<size_t> held{0};
    for_tiles([&](int, Tile& at) {
      std::memset(out + at.start, 0, at.size() * sizeof(T));
      add(at, out + at.start);
      held += at.each([&](size_t j) { out[at.start + j] /= divisor_; });
    });
    return held;
  }

  // Write the entries that some message holds, ascending; return how many.
  size_t to_sparse(Index* indices, T* values) const {
    std::vector<size_t> counts(static_cast<size_t>(use()) + 1);
    for_tiles([&](int t, Tile& at) {
      mark(at);
      counts[static_cast<size_t>(t) + 1] += at.each([](size_t) {});
    });
    for (size_t t = 1; t < counts.size(); ++t) counts[t] += counts[t - 1];
    const size_t held = counts.back();
    for_tiles([&](int t, Tile& at) {
      T sums[tile];
      std::memset(sums, 0, at.size() * sizeof(T));
      add(at, sums);
      size_t& to = counts[static_cast<size_t>(t)];
      at.each([&](size_t j) {
        indices[to] = static_cast<Index>(at.start + j);
        values[to++] = sums[j] / divisor_;
      });
    });
    return held;
  }

 private:
  // A stretch of the result, the entries of it that are held, and where each message goes on.
  struct Tile {
    static constexpr std::uint64_t every = ~std::uint64_t{0};

    size_t start, stop;
    std::uint64_t held[tile / 64];
    std::vector<size_t> next;

    size_t size() const { return stop - start; }

    void hold(size_t j) { held[j / 64] |= std::uint64_t{1} << (j % 64); }

    void hold(size_t first, size_t last) {
      for (; first < last && first % 64 != 0; ++first) hold(first);
      for (; first + 64 <= last; first += 64) held[first / 64] = every;
      for (; first < last; ++first) hold(first);
    }

    template <class F>
    size_t each(F&& f) const {
      size_t count = 0;
      for (size_t word = 0; word < (size() + 63) / 64; ++word) {
        if (held[word] == every) {
          for (size_t j = 64 * word; j < 64 * word + 64; ++j) f(j);
          count += 64;
          continue;
        }
        for (std::uint64_t rest = held[word]; rest != 0; rest &= rest - 1) {
          f(word * 64 + static_cast<size_t>(std::countr_zero(rest)));
          ++count;
        }
      }
      return count;
    }
  };

  size_t total() const {
    size_t sum = 0;
    for (const Incoming<W>& message : messages_) sum += message.count;
    return sum;
  }

  int use() const { return pool_.useful(size_); }

  // Call f(t, tile) for all tiles, those of a thread ascending.
  template <class F>
  void for_tiles(F&& f) const {
    const int threads = use();
    pool_.run(threads, [&](int t) {
      const auto [first, last] = share(size_, t, threads, tile);
      Tile at;
      for (const Incoming<W>& message : messages_) {
        const Index* begin = std::lower_bound(message.indices, message.indices + message.count, first);
        at.next.push_back(static_cast<size_t>(begin - message.indices));
      }
      for (at.start = first; at.start < last; at.start = at.stop) {
        at.stop = std::min(at.start + tile, last);
        std::memset(at.held, 0, (at.size() + 63) / 64 * 8);
        f(t, at);
      }
    });
  }

  void mark(Tile& at) const {
    for (size_t p = 0; p < messages_.size(); ++p) {
      const Incoming<W>& message = messages_[p];
      size_t i = at.next[p];
      for (; i < message.count && message.indices[i] < at.stop; ++i) at.hold(message.indices[i] - at.start);
      at.next[p] = i;
    }
    hold_dense(at);
  }

  void hold_dense(Tile& at) const {
    for_dense(at, [&](size_t first, size_t last, size_t) { at.hold(first - at.start, last - at.start); });
  }

  void add(Tile& at, T* out) const {
    for (size_t p = 0; p < messages_.size(); ++p) {
      const Incoming<W>& message = messages_[p];
      size_t i = at.next[p];
      for (; i < message.count && message.indices[i] < at.stop; ++i) {
        const size_t j = message.indices[i] - at.start;
        out[j] += widen<T>(message.values[i]);
        at.hold(j);
      }
      at.next[p] = i;
      for_dense(at, [&](size_t first, size_t last, size_t from) {
        const W* values = message.values + message.count + from;
        for (size_t k = 0; k < last - first; ++k) out[first - at.start + k] += widen<T>(values[k]);
      });
    }
    hold_dense(at);
  }

  // Call f(first, last, position in the dense values) for what dense pieces have in a tile.
  template <class F>
  void for_dense(const Tile& at, F&& f) const {
    size_t before = 0;
    for (const Dense& piece : dense_) {
      const auto start = static_cast<size_t>(piece.start);
      const auto stop = static_cast<size_t>(piece.stop);
      const size_t first = std::max(start, at.start);
      const size_t last = std::min(stop, at.stop);
      if (first < last) f(first, last, before + (first - start));
      before += stop - start;
    }
  }

  Pool& pool_;
  const Isa isa_;
  const std::vector<Incoming<W>>& messages_;
  const std::vector<Dense>& dense_;
  const T divisor_;
  const size_t size_;
};

}  // namespace mpitopk
