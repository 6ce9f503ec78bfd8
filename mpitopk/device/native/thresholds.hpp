// Where the k-th magnitude of a group will lie, guessed from a sample.
#pragma once

#include <algorithm>
#include <cmath>

#include "scan.hpp"

namespace mpitopk {

// Where the next k-th magnitude will most probably not lie: half an octave below the last one. What is
// smaller need not be kept of a sample.
template <class T>
Bits<T> floor_below(Bits<T> kth) {
  constexpr Bits<T> half_octave = Bits<T>{1} << (Format<T>::mantissa - 1);
  return kth > half_octave ? static_cast<Bits<T>>(kth - half_octave) : Bits<T>{0};
}

// Five standard deviations of the rank in a sample of lines, spread over the group with jitter. Small
// groups need none: everything in them is a candidate. A `floor` that was too high costs a second sample.
template <class T, class Source>
Limits<T> sampled(const Source& source, const Cut& cut, const Group& group, Bits<T> floor,
                  KthScratch<T>& scratch) {
  constexpr size_t line = 64 / sizeof(T);
  constexpr size_t lines_apart = 128;
  constexpr size_t lines_ahead = 16;  // to hide the latency of memory
  constexpr size_t most_lines = 2048;
  constexpr size_t smallest = 4096;
  Limits<T> limits;
  if (group.size < smallest) return limits;
  const size_t lines = std::clamp<size_t>(group.size / (lines_apart * line), 64, most_lines);
  const size_t stride = group.size / lines;
  T* sample = scratch.sample.reserve(lines * line);
  size_t looked_at = 0;
  size_t count = 0;
  size_t before = 0;
  size_t taken = 0;
  const auto position = [&](size_t m) {
    const auto jitter = static_cast<std::uint32_t>(m) * 2654435761u >> 8;
    return m * stride + jitter % std::max<size_t>(1, stride - line);
  };
  for (size_t s = group.first_span; s < group.last_span; ++s) {
    const Span& span = cut.spans[cut.sparse[s]];
    const size_t end = before + (span.stop - span.start);
    for (; taken < lines && position(taken) < end; ++taken) {
      if (position(taken + lines_ahead) < end) {
        source.prefetch(span.start + (position(taken + lines_ahead) - before));
      }
      const size_t i = span.start + (position(taken) - before);
      const size_t length = std::min(line, span.stop - i);
      alignas(64) T room[block];
      Bits<T> most = 0;
      const T* x = source.view(i, length, room, most);
      looked_at += length;
      for (size_t j = 0; j < length; ++j) {
        sample[count] = x[j];
        count += key_of(x[j]) >= floor;
      }
    }
    before = end;
  }
  const double rank = static_cast<double>(group.count) / static_cast<double>(group.size) *
                      static_cast<double>(looked_at);
  const double margin = 5 * std::sqrt(rank) + 3;
  const std::array<Stretch<T>, 1> all{{{sample, count}}};
  if (rank + margin < static_cast<double>(looked_at)) {
    const auto last = static_cast<size_t>(rank + margin);
    if (last > count) return sampled(source, cut, group, Bits<T>{0}, scratch);
    limits.low = std::min(kth_largest(all, last, scratch), Format<T>::too_large);
  }
  if (rank - margin >= 1) {
    const Bits<T> sure = kth_largest(all, static_cast<size_t>(rank - margin), scratch);
    limits.sure = std::min(sure, Format<T>::too_large);
  }
  return limits;
}

}  // namespace mpitopk
