// What the kernels share: number formats, the pieces of a plan, and what the threads of a block do together.
#pragma once

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr unsigned ALL = 0xffffffffu;

// Magnitudes are compared by their bits: Inf is above every finite number and NaN above Inf.
constexpr unsigned INFINITE = 0x7f800000u;
// What is accumulated stays below 2^96, so that no sum over ranks overflows.
constexpr unsigned TOO_LARGE = INFINITE - (32u << 23);
constexpr unsigned NONE = 0x80000000u;  // a threshold above all of them

constexpr long long HEADER = 40;  // bytes of a message before its indices

struct Half {
  unsigned short bits;
};
struct Bfloat16 {
  unsigned short bits;
};

__device__ inline unsigned key_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ inline double widen(double x) { return x; }
__device__ inline float widen(float x) { return x; }
__device__ inline float widen(Bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ inline float widen(Half x) {
  const unsigned sign = (x.bits & 0x8000u) << 16;
  const unsigned magnitude = (x.bits & 0x7fffu) << 13;
  if (magnitude >= 31u << 23) return __uint_as_float(sign | magnitude | INFINITE);
  // The product moves the exponent by 112 and makes subnormal numbers normal; it is exact.
  return __uint_as_float(sign | __float_as_uint(__fmul_rn(__uint_as_float(magnitude), 0x1p112f)));
}

// Round to nearest, ties to even, into the finite range. Not for NaN.
__device__ inline void narrow(float x, float& to) { to = x; }
__device__ inline void narrow(float x, Half& to) {
  const unsigned sign = (__float_as_uint(x) >> 16) & 0x8000u;
  const unsigned bits = key_of(x);
  unsigned magnitude = 0x7bffu;
  if (bits < 0x38800000u) {  // subnormal: the addition rounds
    magnitude = __float_as_uint(__fadd_rn(__uint_as_float(bits), 0.5f)) - 0x3f000000u;
  } else if (bits < 0x477ff000u) {
    magnitude = (bits + 0xfffu + ((bits >> 13) & 1u) - 0x38000000u) >> 13;
  }
  to.bits = static_cast<unsigned short>(sign | magnitude);
}

// A bijection of 32 bits.
__device__ inline unsigned mixed(unsigned v) {
  v = (v ^ v >> 16) * 0x7feb352du;
  v = (v ^ v >> 15) * 0x846ca68bu;
  return v ^ v >> 16;
}

// A stretch of the buffer that one block works on. `before`: entries of the same group ahead of it.
struct Tile {
  long long start;
  long long before;
  int size;
  int group;  // -1: sent dense
};

// Entries of which the `count` largest are sent, at `offset` among all that are; tiles first_tile <= t < last_tile.
struct Group {
  long long size;
  unsigned count;
  unsigned offset;
  int first_tile;
  int last_tile;
};

__device__ inline unsigned lane() { return threadIdx.x % 32; }
__device__ inline unsigned warp() { return threadIdx.x / 32; }
__device__ inline unsigned lanes_before() { return (1u << lane()) - 1; }

__device__ inline unsigned warp_sum(unsigned x) {
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(ALL, x, by);
  return x;
}

// The sum of x over the threads before this one; `total` receives that over all of the block.
__device__ inline unsigned block_prefix(unsigned x, unsigned& total) {
  __shared__ unsigned sums[32];
  unsigned inclusive = x;
  for (unsigned by = 1; by < 32; by *= 2) {
    const unsigned other = __shfl_up_sync(ALL, inclusive, by);
    if (lane() >= by) inclusive += other;
  }
  __syncthreads();  // the last call's sums have been read
  if (lane() == 31) sums[warp()] = inclusive;
  __syncthreads();
  unsigned before = 0;
  total = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) {
    if (w == warp()) before = total;
    total += sums[w];
  }
  return before + inclusive - x;
}
