// Kernels that use what CUDA C++ offers, for comparison with NumPy.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class T>
__global__ void __launch_bounds__(64) scaled(const T* x, T* out, T by, long long n) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * by;
}

__global__ void converted(const float* x, __half* halves, __nv_bfloat16* bfloats, float* back, long long n) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  halves[i] = __float2half_rn(x[i]);
  bfloats[i] = __float2bfloat16_rn(x[i]);
  back[i] = __half2float(halves[i]);
}

// One row for each function, one column for each lane of the only warp.
__global__ void lanes(const unsigned* x, unsigned* out) {
  const unsigned all = 0xffffffffu, i = threadIdx.x;
  const unsigned results[] = {
      __shfl_sync(all, x[i], 5),
      __shfl_up_sync(all, x[i], 3),
      __shfl_down_sync(all, x[i], 3),
      __shfl_xor_sync(all, x[i], 4),
      __ballot_sync(all, x[i] & 1),
      static_cast<unsigned>(__any_sync(all, x[i] == 7)),
      static_cast<unsigned>(__all_sync(all, x[i] < 8)),
      __match_any_sync(all, x[i]),
      __reduce_add_sync(all, x[i]),
      __reduce_max_sync(all, x[i]),
      __reduce_min_sync(all, x[i]),
  };
  for (unsigned row = 0; row < sizeof results / sizeof *results; ++row) out[row * 32 + i] = results[row];
}

__global__ void votes(const int* x, int* out) {
  const int count = __syncthreads_count(x[threadIdx.x] > 3);
  const int some = __syncthreads_or(x[threadIdx.x] == 7);
  const int every = __syncthreads_and(x[threadIdx.x] < 8);
  if (threadIdx.x != 0) return;
  out[0] = count;
  out[1] = some;
  out[2] = every;
}

__global__ void atomics(const unsigned* x, unsigned* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(out, x[i]);
  atomicMax(out + 1, x[i]);
  atomicMin(out + 2, x[i]);
  atomicAnd(out + 3, x[i]);
  atomicOr(out + 4, x[i]);
  atomicSub(out + 5, x[i]);
  atomicExch(out + 6, 9u);
  unsigned seen = out[7];
  while (true) {
    const unsigned now = atomicCAS(out + 7, seen, seen + 1);
    if (now == seen) break;
    seen = now;
  }
}

__global__ void bits(const unsigned* x, int* out, long long n) {
  for (long long i = threadIdx.x; i < n; i += blockDim.x) {
    const unsigned long long wide = static_cast<unsigned long long>(x[i]) << 20;
    const int row[] = {__popc(x[i]), __popcll(wide), __ffs(static_cast<int>(x[i])), __clz(static_cast<int>(x[i])),
                       __clzll(static_cast<long long>(wide))};
    for (int j = 0; j < 5; ++j) out[5 * i + j] = row[j];
  }
}
