// Blocks of entries, each rounded to a multiple of a vector of a codebook: the code, and the sum of the codes of
// all ranks. Threads own groups of blocks; those of one branch are looked at together, a lane for each.
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "nearest.hpp"

namespace mpitopk {

struct Lines {
  static constexpr size_t group = 1024;
  static constexpr size_t chunk = 32;  // blocks whose bits share words
  static constexpr size_t most_branches = 1 << 8;

  const float* vectors;  // a row for each; those of a branch one after the other
  const float* representatives;  // a row for each branch
  size_t entries, block, branches, members;
  int bits, hinge_bits;

  size_t blocks() const { return (entries + block - 1) / block; }
  size_t groups() const { return (blocks() + group - 1) / group; }
  double most() const { return static_cast<double>((1 << (hinge_bits - 1)) - 1); }

  // Words before the bit planes, before the coefficients, and in all.
  template <class T>
  size_t before_planes() const {
    return groups() * (sizeof(T) / 4);
  }
  template <class T>
  size_t before_hinges() const {
    return before_planes<T>() + (blocks() + chunk - 1) / chunk * static_cast<size_t>(bits);
  }
  template <class T>
  size_t words() const {
    return before_hinges<T>() + (blocks() * static_cast<size_t>(hinge_bits) + 31) / 32;
  }
};

// The number of the line of each block of `x`, at most a group of them, and the product with its vector.
struct Search {
  template <Isa isa, class T>
  MPITOPK_INLINE static void run(const T* x, size_t entries, const Lines& lines, std::uint32_t* numbers, T* products) {
    const size_t full = entries / lines.block, blocks = (entries + lines.block - 1) / lines.block;
    T rest[longest] = {};
    std::copy(x + full * lines.block, x + entries, rest);
    std::uint16_t order[Lines::group];
    std::uint32_t branch_of[Lines::group];
    const auto look = [&](size_t first, size_t last, const float* vectors, size_t count, auto found) {
      for (size_t begin = first; begin < last; begin += together) {
        const size_t size = std::min(together, last - begin);
        const T* rows[together];
        std::uint32_t of_rows[together];
        T their[together];
        for (size_t i = 0; i < together; ++i) {
          const size_t at = order[begin + (i < size ? i : 0)];
          rows[i] = at < full ? x + at * lines.block : rest;
        }
        Nearest::run<isa>(rows, lines.block, vectors, count, of_rows, their);
        for (size_t i = 0; i < size; ++i) found(order[begin + i], of_rows[i], their[i]);
      }
    };
    for (size_t i = 0; i < blocks; ++i) order[i] = static_cast<std::uint16_t>(i);
    std::array<std::uint32_t, Lines::most_branches + 1> start{};
    look(0, blocks, lines.representatives, lines.branches, [&](size_t i, std::uint32_t branch, T) {
      branch_of[i] = branch;
      ++start[branch + 1];
    });
    std::partial_sum(start.begin(), start.end(), start.begin());
    for (size_t i = 0; i < blocks; ++i) order[start[branch_of[i]]++] = static_cast<std::uint16_t>(i);
    for (size_t branch = 0, first = 0; branch < lines.branches; first = start[branch++]) {
      const size_t before = branch * lines.members;
      look(first, start[branch], lines.vectors + before * lines.block, lines.members,
           [&](size_t i, std::uint32_t member, T product) {
             numbers[i] = static_cast<std::uint32_t>(before) + member;
             products[i] = product;
           });
    }
  }
};

// The parts of words of code that a group has. H: type of a coefficient.
template <class T, class H, class Word>
struct LineCode {
  T scale() const { return *scale_at; }
  std::conditional_t<std::is_const_v<Word>, const T, T>* scale_at;
  Word* planes;
  std::conditional_t<std::is_const_v<Word>, const H, H>* hinges;

  LineCode(Word* words, const Lines& lines, size_t group) {
    scale_at = reinterpret_cast<decltype(scale_at)>(words) + group;
    planes = words + lines.before_planes<T>() + group * (Lines::group / 32) * static_cast<size_t>(lines.bits);
    hinges = reinterpret_cast<decltype(hinges)>(words + lines.before_hinges<T>()) + group * Lines::group;
  }
};

// The first entry of a group, and the first after it.
inline std::pair<size_t, size_t> entries_of(const Lines& lines, size_t group) {
  const size_t most = Lines::group * lines.block;
  return {group * most, std::min(lines.entries, (group + 1) * most)};
}

// Call f(i, j, c) for each entry j of each block i, with the coordinate c that its vector has there.
template <class F>
MPITOPK_INLINE void for_blocks(size_t entries, const Lines& lines, F&& f, const std::uint32_t* numbers) {
  const auto all = [&](auto block) __attribute__((always_inline)) {
    const size_t full = entries / block;
    for (size_t i = 0; i < full; ++i) {
      const float* vector = lines.vectors + numbers[i] * block;
      for (size_t j = 0; j < block; ++j) f(i, i * block + j, vector[j]);
    }
    const float* vector = lines.vectors + (full * block < entries ? numbers[full] * block : 0);
    for (size_t j = full * block; j < entries; ++j) f(full, j, vector[j - full * block]);
  };
  if (lines.block == 8) {  // the usual one: a constant, for the compiler
    all(std::integral_constant<size_t, 8>{});
  } else {
    all(lines.block);
  }
}

// Accumulate a group of blocks and write their code; whether nothing is too large.
struct EncodeGroup {
  template <Isa isa, class T, class G, class H>
  MPITOPK_INLINE static bool run(const G* gradient, const T* residual, T* out, size_t entries, const Lines& lines,
                                 const LineCode<T, H, std::uint32_t>& code) {
    Bits<T> top = 0;
    for (size_t i = 0; i < entries; ++i) {
      out[i] = residual[i] + widen<T>(gradient[i]);
      top = std::max(top, key_of(out[i]));
    }
    if (top >= Format<T>::too_large) return false;
    std::uint32_t numbers[Lines::group] = {};
    T products[Lines::group];
    Search::run<isa>(static_cast<const T*>(out), entries, lines, numbers, products);
    const size_t blocks = (entries + lines.block - 1) / lines.block;
    T scale = 0;
    for (size_t i = 0; i < blocks; ++i) scale = std::max(scale, std::abs(products[i]));
    *code.scale_at = scale;
    const T most = static_cast<T>(lines.most());
    const T step = scale / most;
    const T divisor = scale > 0 ? scale : T{1};
    for (size_t i = 0; i < blocks; ++i) {
      const T steps = std::nearbyint(products[i] / divisor * most);
      code.hinges[i] = static_cast<H>(steps);
      products[i] = steps * step;
    }
    const auto bits = static_cast<size_t>(lines.bits);
    for (size_t i = 0; i < blocks; i += Lines::chunk) {
      for (size_t b = 0; b < bits; ++b) {
        std::uint32_t word = 0;
        for (size_t k = 0; k < Lines::chunk; ++k) word |= (numbers[i + k] >> b & 1u) << k;
        code.planes[i / Lines::chunk * bits + b] = word;
      }
    }
    const auto subtract = [&](size_t i, size_t j, float c) { out[j] -= products[i] * static_cast<T>(c); };
    for_blocks(entries, lines, subtract, numbers);
    return true;
  }
};

template <class T, class H, class G>
bool encode_lines(Pool& pool, Isa isa, const Lines& lines, const G* gradient, const T* residual, T* out,
                  std::uint32_t* words) {
  std::atomic<bool> sound{true};
  if (lines.entries > 0) words[lines.words<T>() - 1] = 0;  // what fills it up
  pool.each(pool.useful(4 * lines.entries), lines.groups(), [&](int, size_t group) {
    const auto [first, last] = entries_of(lines, group);
    const LineCode<T, H, std::uint32_t> code(words, lines, group);
    if (!run_on<EncodeGroup>(isa, gradient + first, residual + first, out + first, last - first, lines, code)) {
      sound = false;
    }
  });
  return sound;
}

// Add what the code of a group stands for, or write it if it is the first.
struct AddGroup {
  template <Isa, class T, class H>
  MPITOPK_INLINE static void run(const LineCode<T, H, const std::uint32_t>& code, const Lines& lines, bool first,
                                 T* out, size_t entries) {
    const T step = code.scale() / static_cast<T>(lines.most());
    const auto bits = static_cast<size_t>(lines.bits);
    const size_t blocks = (entries + lines.block - 1) / lines.block;
    std::uint32_t numbers[Lines::group];
    T coefficients[Lines::group];
    for (size_t i = 0; i < blocks; i += Lines::chunk) {
      std::uint32_t some[Lines::chunk] = {};
      for (size_t b = 0; b < bits; ++b) {
        const std::uint32_t word = code.planes[i / Lines::chunk * bits + b];
        for (std::uint32_t k = 0; k < Lines::chunk; ++k) some[k] |= (word >> k & 1u) << b;
      }
      std::copy_n(some, Lines::chunk, numbers + i);
    }
    for (size_t i = 0; i < blocks; ++i) coefficients[i] = static_cast<T>(code.hinges[i]) * step;
    const auto value = [&](size_t i, float c) { return coefficients[i] * static_cast<T>(c); };
    if (first) {
      for_blocks(entries, lines, [&](size_t i, size_t j, float c) { out[j] = T{0} + value(i, c); }, numbers);
    } else {
      for_blocks(entries, lines, [&](size_t i, size_t j, float c) { out[j] += value(i, c); }, numbers);
    }
  }
};

template <class T, class H>
void merge_lines(Pool& pool, Isa isa, const Lines& lines, const std::vector<const std::uint32_t*>& messages,
                 T divisor, T* out) {
  pool.each(pool.useful(lines.entries), lines.groups(), [&](int, size_t group) {
    const auto [begin, end] = entries_of(lines, group);
    bool first = true;
    for (const std::uint32_t* words : messages) {
      const LineCode<T, H, const std::uint32_t> code(words, lines, group);
      run_on<AddGroup>(isa, code, lines, first, out + begin, end - begin);
      first = false;
    }
    if (divisor != 1) run_on<Divide>(isa, out + begin, end - begin, divisor);
  });
}

}  // namespace mpitopk
