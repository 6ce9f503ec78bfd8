// Exact selection: guess where the k-th magnitude lies, scan once, refine among the few candidates, and
// where the guess was wrong scan those groups again without one.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.hpp"
#include "scan.hpp"
#include "thresholds.hpp"

namespace mpitopk {

// Whether a number, taken in order, is one of those greater than the k-th, or of the first ties with it.
template <class T>
struct Ranking {
  Bits<T> kth;
  size_t ties;

  MPITOPK_INLINE bool operator()(T x) {
    const Bits<T> key = key_of(x);
    const bool tie = (key == kth) & (ties > 0);
    ties -= tie;
    return (key > kth) | tie;
  }
};

template <class T>
class Selector {
 public:
  Selector(Pool& pool, Isa isa) : pool_(pool), isa_(isa) {}

  size_t fallbacks() const { return fallbacks_; }
  size_t candidates() const { return candidates_; }

  // The plan of the next call of `run`.
  void prepare(size_t n, const std::int64_t* pieces, size_t n_pieces, const std::int64_t* counts,
               size_t n_groups) {
    if (!cut_.update(n, pieces, n_pieces, counts, n_groups, pool_)) return;
    found_.resize(static_cast<size_t>(cut_.threads));
    limits_.resize(n_groups);
    floors_.assign(n_groups, 0);
    stretches_.resize(cut_.sparse.size());
    kth_.resize(n_groups);
    missed_.resize(n_groups);
  }

  size_t total() const { return cut_.total; }

  // Writes the winners to `indices` and `values`, and zeros to `clear` in their place unless it is null.
  // Returns whether nothing is too large; if something is, all that was written is unspecified.
  template <class Source>
  bool run(const Source& source, T* clear, Index* indices, T* values) {
    std::fill(missed_.begin(), missed_.end(), 1);
    for (Found<T>& found : found_) {
      found.count = found.open_count = 0;
      found.finite = true;
    }
    choose_limits(source);
    if (!scan(source, true)) return false;
    refine();
    if (std::find(missed_.begin(), missed_.end(), 1) != missed_.end()) {
      if (clear != nullptr) {
        undo(clear);
        repeat(Plain<T>{clear});
      } else {
        repeat(source);
      }
    }
    emit(clear, indices, values);
    for (size_t g = 0; g < cut_.groups.size(); ++g) floors_[g] = floor_below<T>(kth_[g]);
    candidates_ = 0;
    for (const Found<T>& found : found_) candidates_ += found.count;
    return true;
  }

 private:
  template <class Source>
  void choose_limits(const Source& source) {
    pool_.each(pool_.useful(cut_.size), cut_.groups.size(), [&](int t, size_t g) {
      auto& scratch = found_[static_cast<size_t>(t)].scratch;
      limits_[g] = sampled<T>(source, cut_, cut_.groups[g], floors_[g], scratch);
    });
  }

  // Scan what was missed once more, with everything a candidate; nothing is set to zero on the way.
  template <class Source>
  void repeat(const Source& source) {
    for (size_t g = 0; g < cut_.groups.size(); ++g) {
      if (!missed_[g]) continue;
      limits_[g] = {};
      ++fallbacks_;
    }
    scan(source, false);
    refine();
  }

  // Scan the groups that are still missed, and with `all` the dense pieces too.
  template <class Source>
  bool scan(const Source& source, bool all) {
    pool_.run(cut_.threads, [&](int t) {
      const auto at = static_cast<size_t>(t);
      Found<T>& found = found_[at];
      for (size_t s = cut_.first_of_thread[at]; s < cut_.first_of_thread[at + 1]; ++s) {
        Span& span = cut_.spans[s];
        if (span.group < 0) {
          Limits<T> none{Format<T>::too_large, Format<T>::none};
          if (all) run_on<Scan>(isa_, source, span, none, size_t{0}, found);
        } else {
          const auto g = static_cast<size_t>(span.group);
          if (missed_[g]) run_on<Scan>(isa_, source, span, limits_[g], cut_.groups[g].count, found);
        }
      }
#if MPITOPK_HAVE_AVX2
      _mm_sfence();
#endif
    });
    return std::all_of(found_.begin(), found_.end(), [](const Found<T>& found) { return found.finite; });
  }

  // Find the k-th magnitude of each group that is missed, and how the spans share in the winners.
  void refine() {
    pool_.each(cut_.threads, cut_.groups.size(), [&](int t, size_t g) {
      if (missed_[g]) refine(g, found_[static_cast<size_t>(t)].scratch);
    });
  }

  struct Stretches {
    const Stretch<T>* first;
    const Stretch<T>* last;
    const Stretch<T>* begin() const { return first; }
    const Stretch<T>* end() const { return last; }
  };

  void refine(size_t g, KthScratch<T>& scratch) {
    const Group& group = cut_.groups[g];
    size_t there = 0;
    size_t sure = 0;
    for_spans_of(group, [&](size_t, const Span& span) {
      there += span.end - span.begin;
      sure += span.sure;
    });
    if (there < group.count) return;
    missed_[g] = 0;
    // Where fewer are sure than win, the window decides; it was too low otherwise, and all are looked at.
    const bool window = sure < group.count;
    for_spans_of(group, [&](size_t s, const Span& span) {
      const Found<T>& found = found_[static_cast<size_t>(span.thread)];
      stretches_[s] = window ? Stretch<T>{found.open.data() + span.open_begin, span.open_end - span.open_begin}
                             : Stretch<T>{found.values.data() + span.begin, span.end - span.begin};
    });
    const Stretch<T>* all = stretches_.data();
    const Bits<T> kth = kth_largest(Stretches{all + group.first_span, all + group.last_span},
                                    window ? group.count - sure : group.count, scratch);
    kth_[g] = kth;
    size_t ties = group.count;
    for_spans_of(group, [&](size_t s, Span& span) {
      span.greater = window ? span.sure : 0;
      span.equal = 0;
      for (size_t i = 0; i < stretches_[s].size; ++i) {
        const Bits<T> key = key_of(stretches_[s].data[i]);
        span.greater += key > kth;
        span.equal += key == kth;
      }
      ties -= span.greater;
    });
    size_t offset = group.offset;
    for_spans_of(group, [&](size_t, Span& span) {
      span.offset = offset;
      span.ties = std::min(ties, span.equal);
      ties -= span.ties;
      offset += span.greater + span.ties;
    });
  }

  template <class F>
  void for_spans_of(const Group& group, F&& f) {
    for (size_t s = group.first_span; s < group.last_span; ++s) f(s, cut_.spans[cut_.sparse[s]]);
  }

  // Put back what was set to zero too early, in the groups that are missed.
  void undo(T* x) {
    for_spans([&](const Span& span, size_t g) {
      if (!missed_[g]) return;
      const Found<T>& found = found_[static_cast<size_t>(span.thread)];
      for (size_t i = span.begin; i < span.end; ++i) {
        const T value = found.values.data()[i];
        if (key_of(value) >= limits_[g].sure) x[found.indices.data()[i]] = value;
      }
    });
  }

  void emit(T* clear, Index* indices, T* values) {
    for_spans([&](const Span& span, size_t g) {
      const Found<T>& found = found_[static_cast<size_t>(span.thread)];
      const Index* where = found.indices.data();
      const T* what = found.values.data();
      Ranking<T> wins{kth_[g], span.ties};
      const size_t end = span.offset + span.greater + span.ties;
      for (size_t i = span.begin, to = span.offset; to < end; ++i) {
        indices[to] = where[i];
        values[to] = what[i];
        to += wins(what[i]);
      }
      if (clear == nullptr) return;
      // Those above `sure` are zero already: either some of the others win too, or some of them do not.
      wins = {kth_[g], span.ties};
      if (kth_[g] < limits_[g].sure) {
        for (size_t i = span.open_begin; i < span.open_end; ++i) {
          if (wins(found.open.data()[i])) clear[found.open_indices.data()[i]] = T{0};
        }
      } else {
        for (size_t i = span.begin; i < span.end; ++i) {
          if (key_of(what[i]) >= limits_[g].sure && !wins(what[i])) clear[where[i]] = what[i];
        }
      }
    });
  }

  template <class F>
  void for_spans(F&& f) {
    pool_.run(cut_.threads, [&](int t) {
      const auto at = static_cast<size_t>(t);
      for (size_t s = cut_.first_of_thread[at]; s < cut_.first_of_thread[at + 1]; ++s) {
        const Span& span = cut_.spans[s];
        if (span.group >= 0) f(span, static_cast<size_t>(span.group));
      }
    });
  }

  Pool& pool_;
  const Isa isa_;
  Cut cut_;
  std::vector<Found<T>> found_;
  std::vector<Limits<T>> limits_;
  std::vector<Bits<T>> floors_;
  std::vector<Stretch<T>> stretches_;
  std::vector<Bits<T>> kth_;
  std::vector<char> missed_;
  size_t fallbacks_ = 0;
  size_t candidates_ = 0;
};

}  // namespace mpitopk
