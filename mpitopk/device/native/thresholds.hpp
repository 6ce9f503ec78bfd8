// Where the k-th magnitude of a group will lie: guessed from the last steps, or from a sample.
#pragma once

#include <array>
#include <cmath>

#include "scan.hpp"

namespace mpitopk {

// The k-th magnitudes of the last steps of one group. With error feedback they tend to go on as they
// went before, so that the next one is extrapolated, and the window made as wide as that was wrong of
// late. Where the window would be wide, a sample is better.
template <class T>
class History {
 public:
  void learn(Bits<T> kth) {
    const double now = static_cast<double>(kth);
    const double wrong = std::abs(now - (last_ + step_));
    error_ = known_ < 3 ? wrong : std::max(wrong, 0.75 * error_);
    step_ = now - last_;
    last_ = now;
    known_ = std::min(3, known_ + 1);
  }

  bool guess(Limits<T>& limits) const {
    constexpr double octave = static_cast<double>(Bits<T>{1} << Format<T>::mantissa);
    const double middle = last_ + step_;
    const double width = std::max(3 * error_, octave / 256);
    if (known_ < 3 || width > octave / 32 || middle <= width) return false;
    limits.low = at_most_infinity(middle - width);
    limits.sure = at_most_infinity(middle + width);
    return true;
  }

 private:
  static Bits<T> at_most_infinity(double key) {
    constexpr double infinity = static_cast<double>(Format<T>::infinity);
    return key < infinity ? static_cast<Bits<T>>(key) : Format<T>::infinity;
  }

  double last_ = 0;
  double step_ = 0;
  double error_ = 0;
  int known_ = 0;
};

// Five standard deviations of the rank in a sample of lines, spread over the group with jitter. Small
// groups need none: everything in them is a candidate.
template <class T, class Source>
Limits<T> sampled(const Source& source, const Cut& cut, const Group& group, KthScratch<T>& scratch) {
  constexpr size_t line = 64 / sizeof(T);
  constexpr size_t most_lines = 2048;
  constexpr size_t smallest = 4096;
  Limits<T> limits;
  if (group.size < smallest) return limits;
  const size_t lines = std::min(most_lines, std::max<size_t>(64, group.size / (128 * line)));
  const size_t stride = group.size / lines;
  std::array<T, most_lines * line> sample;
  size_t count = 0;
  size_t before = 0;
  size_t taken = 0;
  std::uint32_t random = 1;
  size_t next = 0;
  for (size_t s = group.first_span; s < group.last_span; ++s) {
    const Span& span = cut.spans[cut.sparse[s]];
    const size_t size = span.stop - span.start;
    while (taken < lines && next < before + size) {
      const size_t i = span.start + (next - before);
      const size_t length = std::min(line, span.stop - i);
      alignas(64) T room[block];
      Bits<T> most = 0;
      const T* x = source.view(i, length, room, most);
      for (size_t j = 0; j < length; ++j) sample[count++] = x[j];
      random = random * 1664525u + 1013904223u;
      ++taken;
      next = taken * stride + (static_cast<size_t>(random >> 8) % std::max<size_t>(1, stride - line));
    }
    before += size;
  }
  const double rank = static_cast<double>(group.count) / static_cast<double>(group.size) *
                      static_cast<double>(count);
  const double margin = 5 * std::sqrt(rank) + 3;
  const std::array<Stretch<T>, 1> all{{{sample.data(), count}}};
  if (rank + margin < static_cast<double>(count)) {
    const Bits<T> low = kth_largest(all, static_cast<size_t>(rank + margin), scratch);
    limits.low = std::min(low, Format<T>::infinity);
  }
  if (rank - margin >= 1) {
    const Bits<T> sure = kth_largest(all, static_cast<size_t>(rank - margin), scratch);
    limits.sure = std::min(sure, Format<T>::infinity);
  }
  return limits;
}

}  // namespace mpitopk
