// The k-th largest magnitude of several stretches of numbers, exactly.
#pragma once

#include <algorithm>
#include <array>
#include <bit>

#include "buffer.hpp"
#include "types.hpp"

namespace mpitopk {

template <class T>
struct Stretch {
  const T* data;
  size_t size;
};

template <class T>
struct KthScratch {
  static constexpr int bits = 11;
  std::array<size_t, size_t{1} << bits> histogram;
  Buffer<Bits<T>> keys;
  Buffer<T> sample;
};

// Histograms narrow the range of keys down to one bin of a few numbers, which are then looked at one
// by one; a bin that stays full is narrowed again. `stretches` is a range of Stretch<T> that together
// hold at least k numbers, k > 0.
template <class T, class Stretches>
Bits<T> kth_largest(const Stretches& stretches, size_t k, KthScratch<T>& scratch) {
  constexpr size_t few = 4096;
  using B = Bits<T>;
  B least = Format<T>::magnitude;
  B most = 0;
  for (const Stretch<T>& stretch : stretches) {
    for (size_t i = 0; i < stretch.size; ++i) {
      const B key = key_of(stretch.data[i]);
      least = std::min(least, key);
      most = std::max(most, key);
    }
  }
  while (least < most) {
    const auto range = static_cast<B>(most - least);
    const int shift = std::max(0, static_cast<int>(std::bit_width(range)) - scratch.bits);
    scratch.histogram.fill(0);
    for (const Stretch<T>& stretch : stretches) {
      for (size_t i = 0; i < stretch.size; ++i) {
        const auto above = static_cast<B>(key_of(stretch.data[i]) - least);
        if (above <= range) ++scratch.histogram[static_cast<size_t>(above >> shift)];
      }
    }
    size_t bin = static_cast<size_t>(range >> shift);
    for (; scratch.histogram[bin] < k; --bin) k -= scratch.histogram[bin];
    least = static_cast<B>(least + (static_cast<B>(bin) << shift));
    most = std::min(most, static_cast<B>(least + ((B{1} << shift) - 1)));
    if (scratch.histogram[bin] > few) continue;
    B* keys = scratch.keys.reserve(few);
    size_t count = 0;
    for (const Stretch<T>& stretch : stretches) {
      for (size_t i = 0; i < stretch.size; ++i) {
        const B key = key_of(stretch.data[i]);
        if (key >= least && key <= most) keys[count++] = key;
      }
    }
    std::nth_element(keys, keys + (count - k), keys + count);
    return keys[count - k];
  }
  return least;
}

}  // namespace mpitopk
