// Entries rounded at random to levels of their bucket's scale, in bit planes; and the sum of such messages.
// A warp has 32 entries, whose codes share words: bit b of the code of lane i is bit i of word b.
//
// quantize reads a gradient twice, the second time from a cache where buckets are short, and writes n bits / 8.
// merge_codes reads n bits / 8 of each message and writes 4 n.
#include "common.cuh"

constexpr int MOST_LEVELS = 128;

__device__ inline long long first_warp() { return blockIdx.x * static_cast<long long>(WARPS) + warp(); }
__device__ inline long long warps_in_all() { return gridDim.x * static_cast<long long>(WARPS); }

// Bring the levels to shared memory; by all threads of the block.
__device__ inline void load_levels(const float* levels, int n_levels, float* to) {
  for (int i = static_cast<int>(threadIdx.x); i < n_levels; i += THREADS) to[i] = levels[i];
  __syncthreads();
}

// The largest magnitude of a bucket, or its 2-norm; `most` receives the bits of the former.
template <class G>
__device__ inline float scale_of(const G* x, int size, bool largest, unsigned& most) {
  double sum = 0;
  most = 0;
  for (int i = static_cast<int>(lane()); i < size; i += 32) {
    const float value = widen(x[i]);
    most = max(most, key_of(value));
    sum += static_cast<double>(value) * value;
  }
  for (int by = 16; by > 0; by /= 2) most = max(most, __shfl_xor_sync(ALL, most, by));
  if (largest) return __uint_as_float(most);
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(ALL, sum, by);
  const double norm = sqrt(sum);
  const float top = __uint_as_float(INFINITE - 1);
  if (most >= INFINITE) return __uint_as_float(most);
  return fmaxf(__uint_as_float(most), norm < top ? static_cast<float>(norm) : top);
}

__device__ inline float ratio_of(float x, float scale) {
  return __fdiv_rn(__uint_as_float(key_of(x)), scale > 0.0f ? scale : 1.0f);
}

// A random number in [0, 1) for each entry.
__device__ inline float uniform(unsigned i, unsigned low, unsigned high) {
  return __fmul_rn(static_cast<float>(mixed(mixed(i ^ low) ^ high) >> 8), 0x1p-24f);
}

// The level below, or the one above where the random number wants it.
__device__ inline unsigned level_of(float ratio, float u, const float* levels, int top) {
  int c = 0;
  for (int half = (top + 1) / 2; half > 0; half /= 2) c += ratio >= levels[c + half] ? half : 0;
  if (c == top) return top;
  const float cut = __fadd_rn(levels[c], __fmul_rn(u, __fsub_rn(levels[c + 1], levels[c])));
  return static_cast<unsigned>(c) + (ratio > cut ? 1u : 0u);
}

// A warp for each bucket. `flag` receives 1 if an entry is NaN or Inf.
template <class G>
__global__ void __launch_bounds__(THREADS) quantize(const G* x, long long n, int bucket, int largest,
                                                    const float* levels, int bits, unsigned low, unsigned high,
                                                    unsigned* codes, float* scales, unsigned* flag) {
  __shared__ float table[MOST_LEVELS];
  const int top = (1 << (bits - 1)) - 1;
  load_levels(levels, top + 1, table);
  const long long buckets = (n + bucket - 1) / bucket;
  for (long long b = first_warp(); b < buckets; b += warps_in_all()) {
    const long long begin = b * bucket;
    const int size = static_cast<int>(min(n - begin, static_cast<long long>(bucket)));
    unsigned most;
    const float scale = scale_of(x + begin, size, largest != 0, most);
    if (lane() == 0) scales[b] = scale;
    if (most >= TOO_LARGE) {
      if (lane() == 0) atomicOr(flag, 1u);
      continue;
    }
    for (int first = 0; first < size; first += 32) {
      const int i = first + static_cast<int>(lane());
      const float value = i < size ? widen(x[begin + i]) : 0.0f;
      const float u = uniform(static_cast<unsigned>(begin + i), low, high);
      const unsigned q = level_of(ratio_of(value, scale), u, table, top);
      const unsigned code = 2 * q + (__float_as_uint(value) >> 31);
      unsigned word = 0;
      for (int bit = 0; bit < bits; ++bit) {
        const unsigned plane = __ballot_sync(ALL, (code >> bit) & 1u);
        if (static_cast<int>(lane()) == bit) word = plane;
      }
      if (static_cast<int>(lane()) < bits) codes[(begin + first) / 32 * bits + lane()] = word;
    }
  }
}

// The sum over the divisor of what the messages at `starts` say: a header, the scales of all buckets, the
// levels, where none are given, and codes. A warp for each 32 entries.
__global__ void __launch_bounds__(THREADS) merge_codes(const unsigned char* buffer, const long long* starts, int ranks,
                                                       const float* levels, int bits, int bucket, float divisor,
                                                       float* out, long long n) {
  const long long buckets = (n + bucket - 1) / bucket;
  const int n_levels = 1 << (bits - 1);
  for (long long group = first_warp(); 32 * group < n; group += warps_in_all()) {
    float sum = 0.0f;
    for (int rank = 0; rank < ranks; ++rank) {
      const float* scales = reinterpret_cast<const float*>(buffer + starts[rank] + HEADER);
      const float* table = levels != nullptr ? levels : scales + buckets;
      const auto* codes = reinterpret_cast<const unsigned*>(scales + buckets + (levels != nullptr ? 0 : n_levels));
      unsigned code = 0;
      for (int bit = 0; bit < bits; ++bit) code |= ((codes[group * bits + bit] >> lane()) & 1u) << bit;
      const float value = __fmul_rn(table[code >> 1], scales[32 * group / bucket]);
      sum = __fadd_rn(sum, __uint_as_float(__float_as_uint(value) | code << 31));
    }
    const long long i = 32 * group + lane();
    if (i < n) out[i] = __fdiv_rn(sum, divisor);
  }
}

// How many ratios lie in which bin: by their exponents, from 2^-24, and three bits more. One is for exactly 1,
// and one for what is not finite. A warp for each bucket.
constexpr int RATIO_BINS = 194;

template <class G>
__global__ void __launch_bounds__(THREADS) count_ratios(const G* x, long long n, int bucket, int largest,
                                                        unsigned* counts) {
  __shared__ unsigned mine[RATIO_BINS];
  for (int i = static_cast<int>(threadIdx.x); i < RATIO_BINS; i += THREADS) mine[i] = 0;
  __syncthreads();
  const long long buckets = (n + bucket - 1) / bucket;
  for (long long b = first_warp(); b < buckets; b += warps_in_all()) {
    const long long begin = b * bucket;
    const int size = static_cast<int>(min(n - begin, static_cast<long long>(bucket)));
    unsigned most;
    const float scale = scale_of(x + begin, size, largest != 0, most);
    if (scale == 0.0f) continue;
    for (int i = static_cast<int>(lane()); i < size; i += 32) {
      const int bin = static_cast<int>(key_of(ratio_of(widen(x[begin + i]), scale)) >> 20) - (127 - 24) * 8;
      atomicAdd(mine + min(max(bin, 0), RATIO_BINS - 1), 1u);
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < RATIO_BINS; i += THREADS) {
    if (mine[i] != 0) atomicAdd(counts + i, mine[i]);
  }
}
