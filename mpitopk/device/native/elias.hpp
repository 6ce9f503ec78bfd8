// Codes in bit planes, as Elias's omega code writes down the gaps between levels above 0, signs and levels.
#pragma once

#include <bit>

#include "codes.hpp"

namespace mpitopk {

// Writes bits from the highest of each word on.
class BitWriter {
 public:
  explicit BitWriter(std::uint32_t* to) : to_(to) {}

  void put(std::uint64_t bits, int length) {  // at most 32 of them
    held_ = held_ << length | bits;
    waiting_ += length;
    total_ += static_cast<std::uint32_t>(length);
    if (waiting_ >= 32) *to_++ = static_cast<std::uint32_t>(held_ >> (waiting_ -= 32));
  }

  // "0" preceded by n in binary, that by the number of its bits less 1, and so on down to 1.
  void omega(std::uint32_t n) {
    std::uint64_t bits = 0;
    int length = 1;
    for (; n > 1; n = static_cast<std::uint32_t>(std::bit_width(n)) - 1) {
      bits |= static_cast<std::uint64_t>(n) << length;
      length += static_cast<int>(std::bit_width(n));
    }
    put(bits, length);
  }

  // Fill the last word up; return how many bits there were.
  std::uint32_t end() {
    if (waiting_ > 0) *to_ = static_cast<std::uint32_t>(held_ << (32 - waiting_));
    return total_;
  }

 private:
  std::uint32_t* to_;
  std::uint64_t held_ = 0;
  int waiting_ = 0;
  std::uint32_t total_ = 0;
};

class BitReader {
 public:
  BitReader(const std::uint32_t* from, std::uint32_t size) : from_(from), size_(size) {}

  // The next bit; 0 behind the last one.
  std::uint32_t bit() {
    const std::uint32_t at = at_++;
    return at < size_ ? from_[at / 32] >> (31 - at % 32) & 1u : 0u;
  }

  // A number from 1; 0 for what cannot be one.
  std::uint32_t omega() {
    std::uint32_t n = 1;
    while (bit() == 1) {
      if (n >= 20) return 0;
      std::uint32_t next = 1;
      for (std::uint32_t i = 0; i < n; ++i) next = next << 1 | bit();
      n = next;
    }
    return n;
  }

  bool at_end() const { return at_ == size_; }

 private:
  const std::uint32_t* from_;
  std::uint32_t size_;
  std::uint32_t at_ = 0;
};

// The bits and the levels above 0 of one bucket.
struct Extent {
  std::uint32_t bits, entries;
};

inline Extent to_elias(const std::uint32_t* words, size_t size, int bits, std::uint32_t* out) {
  BitWriter writer(out);
  std::uint32_t entries = 0;
  size_t next = 0;  // the first entry that a gap counts
  for (size_t begin = 0; begin < size; begin += group, words += bits) {
    std::uint32_t some = 0;
    for (int b = 1; b < bits; ++b) some |= words[b];
    for (; some != 0; some &= some - 1) {
      const int i = std::countr_zero(some);
      std::uint32_t q = 0;
      for (int b = 1; b < bits; ++b) q |= (words[b] >> i & 1u) << (b - 1);
      const size_t at = begin + static_cast<size_t>(i);
      writer.omega(static_cast<std::uint32_t>(at - next + 1));
      writer.put(words[0] >> i & 1u, 1);
      writer.omega(q);
      next = at + 1;
      ++entries;
    }
  }
  return {writer.end(), entries};
}

// Whether it is what `to_elias` writes for a bucket of that size.
inline bool from_elias(const std::uint32_t* from, Extent extent, size_t size, int bits, std::uint32_t* words) {
  std::fill(words, words + (size + group - 1) / group * static_cast<size_t>(bits), 0u);
  BitReader reader(from, extent.bits);
  size_t at = 0;
  for (std::uint32_t left = extent.entries; left > 0; --left) {
    const std::uint32_t gap = reader.omega();
    const std::uint32_t sign = reader.bit();
    const std::uint32_t q = reader.omega();
    if (gap == 0 || gap > size - at || q == 0 || q >= 1u << (bits - 1)) return false;
    at += gap;
    std::uint32_t* here = words + (at - 1) / group * static_cast<size_t>(bits);
    const std::uint32_t code = 2 * q + sign;
    for (int b = 0; b < bits; ++b) here[b] |= (code >> b & 1u) << ((at - 1) % group);
  }
  return reader.at_end();
}

inline size_t words_for(std::uint32_t bits) { return (size_t{bits} + 31) / 32; }

}  // namespace mpitopk
