// Barriers of a block, and what the lanes of a warp do together. The mask must name the lanes that come,
// all from one line; __activemask() is left out, since what it returns is an accident of scheduling.
#pragma once

#define __syncthreads() static_cast<void>(cudasim::cudasim_barrier(0, __LINE__))
#define __syncthreads_count(p) (cudasim::cudasim_barrier((p) != 0, __LINE__))
#define __syncthreads_or(p) (cudasim::cudasim_barrier((p) != 0, __LINE__) != 0)
#define __syncthreads_and(p) (cudasim::cudasim_barrier((p) == 0, __LINE__) == 0)

namespace cudasim {

enum Operation { sync, shuffle, ballot, match, reduce };

template <class T>
std::uint64_t packed(T value) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}

template <class T>
T unpacked(std::uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// The value of lane `from`, or this lane's own where there is none.
template <class T>
CUDASIM_UNSEEN T exchanged(unsigned mask, T value, int from, bool inside, int line) {
  const unsigned lane = inside ? static_cast<unsigned>(from) : current->lane;
  const std::uint64_t* words = cudasim_warp(mask, packed(value), shuffle, line, false);
  if ((mask >> lane & 1u) == 0) cudasim_fail("a shuffle reads a lane outside of its mask", line);
  return unpacked<T>(words[lane]);
}

template <class T, class F>
CUDASIM_UNSEEN T reduced(unsigned mask, T value, int line, F&& f) {
  const std::uint64_t* words = cudasim_warp(mask, packed(value), reduce, line, false);
  bool first = true;
  T result{};
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1u) == 0) continue;
    result = first ? unpacked<T>(words[i]) : f(result, unpacked<T>(words[i]));
    first = false;
  }
  return result;
}

}  // namespace cudasim

inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
  cudasim::cudasim_warp(mask, 0, cudasim::sync, line, true);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int line = __builtin_LINE()) {
  return cudasim::exchanged(mask, value, from & 31, true, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int line = __builtin_LINE()) {
  const int from = static_cast<int>(cudasim::current->lane) - static_cast<int>(by);
  return cudasim::exchanged(mask, value, from, from >= 0, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int line = __builtin_LINE()) {
  const int from = static_cast<int>(cudasim::current->lane + by);
  return cudasim::exchanged(mask, value, from, from < 32, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int by, int line = __builtin_LINE()) {
  return cudasim::exchanged(mask, value, static_cast<int>(cudasim::current->lane) ^ by, true, line);
}

CUDASIM_UNSEEN inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  const std::uint64_t* words = cudasim::cudasim_warp(mask, predicate != 0, cudasim::ballot, line, false);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1u) != 0) result |= static_cast<unsigned>(words[i]) << i;
  }
  return result;
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, line) == mask;
}
template <class T>
CUDASIM_UNSEEN unsigned __match_any_sync(unsigned mask, T value, int line = __builtin_LINE()) {
  const std::uint64_t own = cudasim::packed(value);
  const std::uint64_t* words = cudasim::cudasim_warp(mask, own, cudasim::match, line, false);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1u) != 0 && words[i] == own) result |= 1u << i;
  }
  return result;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, int line = __builtin_LINE()) {
  return cudasim::reduced(mask, value, line, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, int line = __builtin_LINE()) {
  return cudasim::reduced(mask, value, line, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, int line = __builtin_LINE()) {
  return cudasim::reduced(mask, value, line, [](unsigned a, unsigned b) { return std::min(a, b); });
}
