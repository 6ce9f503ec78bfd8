// CUDA C++ as host code: what a .cu file sees when g++ compiles it with `-include cuda.hpp`. One thread of
// the system runs a block, one fiber a CUDA thread (scheduler.cpp). What is missing here does not compile.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define CUDASIM_TSAN(x) x
#else
#define CUDASIM_TSAN(x)
#endif
#define CUDASIM_UNSEEN __attribute__((no_sanitize("thread")))  // what it accesses belongs to no kernel

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace cudasim {

// What a kernel may know of the CUDA thread that runs.
struct Thread {
  uint3 thread, block;
  dim3 block_size, grid_size;
  unsigned lane;
  // A fence orders atomics only, and only for ThreadSanitizer, which does not know fences.
  bool fenced = false;
  unsigned n_seen = 0;
  void* seen[8];
};

extern __thread Thread* current __attribute__((tls_model("initial-exec")));

extern "C" {
int cudasim_barrier(int predicate, int line);  // the number of threads whose predicate held
const std::uint64_t* cudasim_warp(unsigned mask, std::uint64_t value, int operation, int line, bool orders);
void* cudasim_dynamic_shared();
void cudasim_yield();  // may let another thread of the block go on
[[noreturn]] void cudasim_fail(const char* what, int line);
}

}  // namespace cudasim

#define threadIdx (cudasim::current->thread)
#define blockIdx (cudasim::current->block)
#define blockDim (cudasim::current->block_size)
#define gridDim (cudasim::current->grid_size)
constexpr int warpSize = 32;

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#if defined(__SANITIZE_ADDRESS__)
#define __shared__ static  // blocks run one by one: only static storage has red zones
#else
#define __shared__ thread_local
#endif

#include "intrinsics.hpp"

#include "atomics.hpp"
#include "warp.hpp"

#include "registry.hpp"
