// Counts what kernels load and store in global memory, in the functions that g++ -fsanitize=thread has
// called at every access: ours, in place of ThreadSanitizer's. Blocks must run one by one.
#pragma once

#include <vector>

#include "cuda.hpp"

namespace {

constexpr std::uintptr_t sector_size = 32;

// Bit i stands for byte i of the sector.
struct Sector {
  unsigned touched = 0, by_block = 0;
  unsigned long long block = 0;  // the last that came, counted from 1
};

struct Range {
  std::uintptr_t begin, end;
  std::vector<Sector> loaded, stored;
};
std::vector<Range> global_memory;

struct Traffic {
  unsigned long long loaded = 0, stored = 0, sectors = 0, by_blocks = 0;
} traffic;

void touch(std::vector<Sector>& sectors, std::uintptr_t at, size_t size, unsigned long long& bytes) {
  const cudasim::Thread& me = *cudasim::current;
  const auto& [x, y, z] = me.block;
  const unsigned long long block = x + me.grid_size.x * (y + 1ull * me.grid_size.y * z) + 1;
  for (size_t part; size > 0; at += part, size -= part) {
    part = std::min(size, sector_size - at % sector_size);
    Sector& sector = sectors[at / sector_size];
    const auto bits = static_cast<unsigned>(((1ull << part) - 1) << at % sector_size);
    if (sector.block != block) sector.block = block, sector.by_block = 0;
    bytes += static_cast<unsigned>(__builtin_popcount(bits & ~sector.touched));
    traffic.sectors += sector.touched == 0 ? sector_size : 0;
    traffic.by_blocks += static_cast<unsigned>(__builtin_popcount(bits & ~sector.by_block));
    sector.touched |= bits;
    sector.by_block |= bits;
  }
}

Range* range_of(std::uintptr_t address) {
  for (Range& range : global_memory) {
    if (address >= range.begin && address < range.end) return &range;
  }
  return nullptr;
}

template <class T>
void load(T* p, size_t size = sizeof(T)) {
  const auto at = reinterpret_cast<std::uintptr_t>(p);
  if (Range* range = range_of(at)) touch(range->loaded, at - range->begin, size, traffic.loaded);
}
template <class T>
void store(T* p, size_t size = sizeof(T)) {
  const auto at = reinterpret_cast<std::uintptr_t>(p);
  if (Range* range = range_of(at)) touch(range->stored, at - range->begin, size, traffic.stored);
}

}  // namespace

extern "C" {

// What the Python side calls. Ranges (begin, end) begin where a sector does.
void cudasim_count(const std::uintptr_t* ranges, unsigned n) {
  traffic = {};
  global_memory.clear();
  for (; n > 0; --n, ranges += 2) {
    const size_t sectors = (ranges[1] - ranges[0]) / sector_size + 1;
    global_memory.push_back({ranges[0], ranges[1], std::vector<Sector>(sectors), std::vector<Sector>(sectors)});
  }
}
const Traffic* cudasim_counted() { return &traffic; }

// What the kernels call.
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_atomic_thread_fence(int) {}
void __tsan_read_range(char* p, size_t size) { load(p, size); }
void __tsan_write_range(char* p, size_t size) { store(p, size); }

#define CUDASIM_ACCESS(size)                                          \
  void __tsan_read##size(char* p) { load(p, size); }                  \
  void __tsan_write##size(char* p) { store(p, size); }                \
  void __tsan_unaligned_read##size(char* p) { load(p, size); }        \
  void __tsan_unaligned_write##size(char* p) { store(p, size); }
CUDASIM_ACCESS(1)
CUDASIM_ACCESS(2)
CUDASIM_ACCESS(4)
CUDASIM_ACCESS(8)
CUDASIM_ACCESS(16)
#undef CUDASIM_ACCESS

// The two that cudasim::update needs: with one worker nobody comes between them.
#define CUDASIM_UPDATE(name, type)                                                 \
  type __tsan_##name##_load(type* p, int) {                                        \
    load(p);                                                                       \
    return *p;                                                                     \
  }                                                                                \
  bool __tsan_##name##_compare_exchange_weak(type* p, type*, type next, int, int) { \
    store(p);                                                                      \
    *p = next;                                                                     \
    return true;                                                                   \
  }
CUDASIM_UPDATE(atomic32, unsigned)
CUDASIM_UPDATE(atomic64, unsigned long long)
#undef CUDASIM_UPDATE

}  // extern "C"
