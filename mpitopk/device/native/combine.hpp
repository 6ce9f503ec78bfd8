// Two sparse messages of a plan added up, and cut down to the plan's counts again.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "select.hpp"

namespace mpitopk {

constexpr Index nowhere = ~Index{0};

template <class I, class T>
struct Entries {
  I* indices;
  T* values;
};

enum class Combined { fine, too_large, misplaced };

// Groups are shared out among the threads; those of a plan have `offset` and `count` entries in every list.
template <class T>
class Combine {
 public:
  Combined run(Pool& pool, const Cut& cut, Entries<const Index, const T> mine, Entries<const Index, const T> theirs,
               Entries<Index, T> out, Entries<Index, T> dropped) {
    indices_.reserve(2 * cut.total);
    sums_.reserve(2 * cut.total);
    scratch_.resize(static_cast<size_t>(pool.threads()));
    std::atomic<bool> misplaced{false}, too_large{false};
    pool.each(pool.useful(2 * cut.total), cut.groups.size(), [&](int t, size_t g) {
      const Group& group = cut.groups[g];
      const size_t first = group.offset;
      const size_t end = first + group.count;
      if (!placed(cut, group, theirs.indices + first)) {
        misplaced = true;
        return;
      }
      const size_t held = add(mine, theirs, first, end);
      const Index* where = indices_.data() + 2 * first;
      const T* sums = sums_.data() + 2 * first;
      const std::array<Stretch<T>, 1> all{{{sums, held}}};
      const Bits<T> kth = kth_largest(all, group.count, scratch_[static_cast<size_t>(t)]);
      size_t ties = group.count;
      bool sound = true;
      for (size_t i = 0; i < held; ++i) {
        ties -= key_of(sums[i]) > kth;
        sound &= key_of(sums[i]) < Format<T>::too_large;
      }
      if (!sound) too_large = true;
      // The next place is written until its entry has come: nothing here can be foretold, so nothing branches.
      const auto pick = [&](Entries<Index, T> list, size_t to, size_t stop, bool winners) {
        Ranking<T> wins{kth, ties};
        for (size_t i = 0; to < stop; ++i) {
          list.indices[to] = where[i];
          list.values[to] = sums[i];
          to += wins(sums[i]) == winners;
        }
      };
      const size_t left = first + held - group.count;
      pick(out, first, end, true);
      pick(dropped, first, left, false);
      std::fill(dropped.indices + left, dropped.indices + end, nowhere);
      std::fill(dropped.values + left, dropped.values + end, T{0});
    });
    return misplaced ? Combined::misplaced : too_large ? Combined::too_large : Combined::fine;
  }

 private:
  // Whether the indices are ascending and in the group.
  static bool placed(const Cut& cut, const Group& group, const Index* x) {
    const Span& begin = cut.spans[cut.sparse[group.first_span]];
    const Span& end = cut.spans[cut.sparse[group.last_span - 1]];
    bool right = x[0] >= begin.start && x[group.count - 1] < end.stop;
    for (size_t i = 1; i < group.count; ++i) right &= x[i - 1] < x[i];
    return right;
  }

  // Write the sum of entries first to end of both to scratch, from 2 first on; return how many it has.
  size_t add(Entries<const Index, const T> a, Entries<const Index, const T> b, size_t first, size_t end) {
    size_t i = first;
    size_t j = first;
    size_t to = 2 * first;
    for (; i < end && j < end; ++to) {
      const Index x = a.indices[i];
      const Index y = b.indices[j];
      indices_.data()[to] = std::min(x, y);
      const T ways[] = {b.values[j], a.values[i], a.values[i] + b.values[j]};
      sums_.data()[to] = ways[(x <= y) + (x == y)];
      i += x <= y;
      j += y <= x;
    }
    for (; i < end; ++i, ++to) put(to, a.indices[i], a.values[i]);
    for (; j < end; ++j, ++to) put(to, b.indices[j], b.values[j]);
    return to - 2 * first;
  }

  void put(size_t to, Index index, T value) {
    indices_.data()[to] = index;
    sums_.data()[to] = value;
  }

  Buffer<Index> indices_;
  Buffer<T> sums_;
  std::vector<KthScratch<T>> scratch_;
};

// x[i] += value, for those i that are among the winners, or those that are not. Both are ascending, but for
// what is nowhere and passed over.
template <class T>
bool put_back(Pool& pool, T* x, size_t size, Entries<const Index, const T> entries, size_t count,
              const Index* winners, size_t n_winners, bool among) {
  return all_parts(pool, count, [&](size_t first, size_t part) {
    const Index* const end = winners + n_winners;
    const Index* next = nullptr;
    for (size_t i = first; i < first + part; ++i) {
      const Index at = entries.indices[i];
      if (at == nowhere) continue;
      if (next == nullptr) next = std::lower_bound(winners, end, at);
      while (next != end && *next < at) ++next;
      if ((next != end && *next == at) != among) continue;
      if (at >= size) return false;
      x[at] += entries.values[i];
    }
    return true;
  });
}

}  // namespace mpitopk
