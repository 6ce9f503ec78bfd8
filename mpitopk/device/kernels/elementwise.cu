// Entry by entry: what needs no order. `flag` receives 1 if an entry is NaN, Inf or, accumulated, too large.
#include "common.cuh"

__device__ inline long long first_entry() {
  return blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
}
__device__ inline long long threads_in_all() { return static_cast<long long>(gridDim.x) * THREADS; }

// Reads 4 n (2 n of 16 bits) and with a residual 4 n more, writes 4 n. `out` may be one of both.
template <class G>
__global__ void __launch_bounds__(THREADS) accumulate(const G* gradient, const float* residual, float* out, long long n,
                                                      float scale, float keep, unsigned* flag) {
  unsigned most = 0;
  for (long long i = first_entry(); i < n; i += threads_in_all()) {
    const float x = __fmul_rn(scale, widen(gradient[i]));
    const float sum = residual == nullptr ? x : __fadd_rn(__fmul_rn(keep, residual[i]), x);
    out[i] = sum;
    most = max(most, key_of(sum));
  }
  if (most >= TOO_LARGE) atomicOr(flag, 1u);
}

// The sums of x, or of its squares, over stretches of 16 THREADS entries, in a fixed order. Reads each once.
// Squares of at most 24 bits are exact, so that fused operations change nothing.
template <class G>
__device__ void sum_stretch(const G* x, long long n, double* out, bool squared) {
  __shared__ double sums[THREADS];
  const long long begin = blockIdx.x * 16LL * THREADS + threadIdx.x;
  double sum = 0;
  for (long long i = begin; i < min(n, begin + 16LL * THREADS); i += THREADS) {
    const double value = widen(x[i]);
    sum += squared ? value * value : value;
  }
  sums[threadIdx.x] = sum;
  for (unsigned half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = sums[0];
}

template <class G>
__global__ void __launch_bounds__(THREADS) squares(const G* x, long long n, double* out) {
  sum_stretch(x, n, out, true);
}
__global__ void __launch_bounds__(THREADS) sums(const double* x, long long n, double* out) {
  sum_stretch(x, n, out, false);
}

template <class G>
__global__ void __launch_bounds__(THREADS) all_finite(const G* x, long long n, unsigned* flag) {
  unsigned most = 0;
  for (long long i = first_entry(); i < n; i += threads_in_all()) most = max(most, key_of(widen(x[i])));
  if (most >= INFINITE) atomicOr(flag, 1u);
}

// `total` receives how many entries were NaN or Inf.
template <class G>
__global__ void __launch_bounds__(THREADS) zero_nonfinite(G* x, long long n, unsigned long long* total) {
  unsigned mine = 0;
  for (long long i = first_entry(); i < n; i += threads_in_all()) {
    if (key_of(widen(x[i])) < INFINITE) continue;
    x[i] = G{};
    ++mine;
  }
  unsigned all;
  block_prefix(mine, all);
  if (threadIdx.x == 0 && all > 0) atomicAdd(total, static_cast<unsigned long long>(all));
}

__global__ void __launch_bounds__(THREADS) divide(float* x, long long n, float divisor, unsigned* flag) {
  unsigned most = 0;
  for (long long i = first_entry(); i < n; i += threads_in_all()) {
    const float quotient = __fdiv_rn(x[i], divisor);
    x[i] = quotient;
    most = max(most, key_of(quotient));
  }
  if (most >= INFINITE) atomicOr(flag, 1u);
}

template <class X>
__global__ void __launch_bounds__(THREADS) take(X* x, const unsigned* indices, float* values, long long k, int clear) {
  for (long long i = first_entry(); i < k; i += threads_in_all()) {
    values[i] = widen(x[indices[i]]);
    if (clear != 0) x[indices[i]] = X{};
  }
}

// Write k selected entries and then the dense pieces to a message; leave in x what the message does not carry.
// `pieces`: rows (start, stop, position among the dense values); `to_indices` may be null.
template <class V>
__global__ void __launch_bounds__(THREADS) pack(float* x, const unsigned* indices, const float* values, long long k,
                                                const long long* pieces, int n_pieces, unsigned* to_indices,
                                                V* to_values) {
  for (long long i = first_entry(); i < k; i += threads_in_all()) {
    V rounded;
    narrow(values[i], rounded);
    to_values[i] = rounded;
    if (to_indices != nullptr) to_indices[i] = indices[i];
    if (sizeof(V) < sizeof(float)) x[indices[i]] = __fsub_rn(values[i], widen(rounded));
  }
  for (int p = 0; p < n_pieces; ++p) {
    const long long start = pieces[3 * p];
    const long long size = pieces[3 * p + 1] - start;
    V* to = to_values + k + pieces[3 * p + 2];
    for (long long i = first_entry(); i < size; i += threads_in_all()) {
      V rounded;
      narrow(x[start + i], rounded);
      to[i] = rounded;
      x[start + i] = sizeof(V) < sizeof(float) ? __fsub_rn(x[start + i], widen(rounded)) : 0.0f;
    }
  }
}

// Bring the headers of all messages together: `starts` and the size of a header are multiples of 8 bytes.
__global__ void __launch_bounds__(THREADS) heads(const unsigned char* messages, const long long* starts, int ranks,
                                                 unsigned long long* out) {
  constexpr int WORDS = 5;
  for (int i = threadIdx.x; i < ranks * WORDS; i += THREADS) {
    out[i] = reinterpret_cast<const unsigned long long*>(messages + starts[i / WORDS])[i % WORDS];
  }
}
