// The plan as the kernels see it: pieces cut where the threads' ranges meet.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "pool.hpp"
#include "types.hpp"

namespace mpitopk {

// A part of one piece inside one thread's range, and what was found there: entries begin to end of the
// thread's list, of which the `sure` ones lie above the window and those of `open` inside of it. Those
// greater than the k-th magnitude and `ties` of those equal to it belong to the result, from `offset` on.
struct Span {
  size_t start, stop;
  std::ptrdiff_t group;  // -1: dense
  int thread;
  size_t begin = 0, end = 0;
  size_t sure = 0, open_begin = 0, open_end = 0;
  size_t greater = 0, equal = 0;
  size_t offset = 0, ties = 0;
};

// The spans of a group are neighbours in `Cut::sparse`.
struct Group {
  size_t size, count, offset;
  size_t first_span, last_span;
};

struct Piece {
  std::int64_t start, stop, group;
};

// The pieces and counts of a call, and whether they are those of the last call.
class Cut {
 public:
  std::vector<Span> spans;             // ascending, dense ones included
  std::vector<size_t> sparse;          // the spans that belong to a group
  std::vector<size_t> first_of_thread; // in `spans`, threads + 1
  std::vector<Group> groups;
  std::vector<Piece> pieces;
  std::vector<std::int64_t> counts;
  size_t size = 0;
  size_t total = 0;
  int threads = 0;

  // Returns whether anything changed. Throws std::invalid_argument and stays as it was.
  bool update(size_t n, const std::int64_t* rows, size_t n_rows, const std::int64_t* wanted,
              size_t n_groups, const Pool& pool) {
    if (same(n, rows, n_rows, wanted, n_groups)) return false;
    Cut next;
    next.build(n, rows, n_rows, wanted, n_groups, pool.useful(n));
    *this = std::move(next);
    return true;
  }

 private:
  bool same(size_t n, const std::int64_t* rows, size_t n_rows, const std::int64_t* wanted,
            size_t n_groups) const {
    if (threads == 0 || n != size || n_rows != pieces.size() || n_groups != counts.size()) return false;
    for (size_t i = 0; i < n_rows; ++i) {
      const Piece& p = pieces[i];
      const std::int64_t* row = rows + 3 * i;
      if (p.start != row[0] || p.stop != row[1] || p.group != row[2]) return false;
    }
    return std::equal(counts.begin(), counts.end(), wanted);
  }

  void build(size_t n, const std::int64_t* rows, size_t n_rows, const std::int64_t* wanted,
             size_t n_groups, int use) {
    if (n > std::numeric_limits<Index>::max()) throw std::invalid_argument("more than 2**32 - 1 entries");
    size = n;
    threads = use;
    counts.assign(wanted, wanted + n_groups);
    std::int64_t at = 0;
    for (size_t i = 0; i < n_rows; ++i) {
      const Piece p{rows[3 * i], rows[3 * i + 1], rows[3 * i + 2]};
      if (p.start != at || p.stop < p.start) {
        throw std::invalid_argument("pieces: must be ascending, without gap or overlap, from 0");
      }
      at = p.stop;
      if (p.group >= 0) {
        if (p.group == static_cast<std::int64_t>(groups.size())) groups.push_back({});
        if (p.group + 1 != static_cast<std::int64_t>(groups.size())) {
          throw std::invalid_argument("pieces: groups must be numbered in order and not interleave");
        }
        groups.back().size += static_cast<size_t>(p.stop - p.start);
      } else if (p.group != -1) {
        throw std::invalid_argument("pieces: a group is -1 or a position in counts");
      }
      pieces.push_back(p);
    }
    if (at != static_cast<std::int64_t>(n)) throw std::invalid_argument("pieces: must end with the buffer");
    if (groups.size() != n_groups) throw std::invalid_argument("counts: one for each group of the pieces");
    for (size_t g = 0; g < n_groups; ++g) {
      if (wanted[g] <= 0 || static_cast<size_t>(wanted[g]) >= groups[g].size) {
        throw std::invalid_argument("counts: more than 0 and less than the size of the group");
      }
      groups[g].count = static_cast<size_t>(wanted[g]);
      groups[g].offset = total;
      total += groups[g].count;
    }
    cut();
  }

  void cut() {
    size_t i = 0;
    for (int t = 0; t < threads; ++t) {
      first_of_thread.push_back(spans.size());
      const auto [first, last] = share(size, t, threads, 64);
      for (; i < pieces.size(); ++i) {
        const Piece& p = pieces[i];
        const size_t start = std::max(first, static_cast<size_t>(p.start));
        const size_t stop = std::min(last, static_cast<size_t>(p.stop));
        if (start < stop) spans.push_back({start, stop, static_cast<std::ptrdiff_t>(p.group), t});
        if (static_cast<size_t>(p.stop) > last) break;  // goes on in the next thread's range
      }
    }
    first_of_thread.push_back(spans.size());
    for (Group& group : groups) group.first_span = group.last_span = 0;
    for (size_t s = 0; s < spans.size(); ++s) {
      if (spans[s].group < 0) continue;
      Group& group = groups[static_cast<size_t>(spans[s].group)];
      if (group.last_span == 0) group.first_span = sparse.size();
      sparse.push_back(s);
      group.last_span = sparse.size();
    }
  }
};

}  // namespace mpitopk
