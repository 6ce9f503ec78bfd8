// Kernels with one fault each, and their clean twins: what the lanes must find, and what they must not.
__global__ void out_of_bounds(float* x) { x[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f; }

__global__ void shared_out_of_bounds(int* out, int by) {
  __shared__ int room[64];
  int* p = room;
  p[threadIdx.x + by] = static_cast<int>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = room[threadIdx.x];
}

__global__ void dynamic_out_of_bounds(int* out, int by) {
  extern __shared__ int room[];
  room[threadIdx.x + by] = static_cast<int>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = room[threadIdx.x];
}

__global__ void reversed(int* out) {
  __shared__ int room[64];
  room[threadIdx.x] = static_cast<int>(threadIdx.x);
#ifndef WITHOUT_BARRIER
  __syncthreads();
#endif
  out[threadIdx.x] = room[63 - threadIdx.x];
}

__global__ void swapped(int* out) {
  __shared__ int room[32];
  room[threadIdx.x] = static_cast<int>(threadIdx.x);
#ifndef WITHOUT_BARRIER
  __syncwarp();
#endif
  out[threadIdx.x] = room[threadIdx.x ^ 1];
}

__global__ void counted(unsigned* count) {
#ifdef WITHOUT_ATOMIC
  *count = *count + 1;
#else
  atomicAdd(count, 1u);
#endif
}

// The last block sums what all have written.
__global__ void summed(const float* x, float* parts, float* sum, unsigned* finished) {
  if (threadIdx.x != 0) return;
  parts[blockIdx.x] = x[blockIdx.x];
#ifndef WITHOUT_FENCE
  __threadfence();
#endif
  const bool last = atomicAdd(finished, 1u) == gridDim.x - 1;
  __threadfence();
  if (!last) return;
  float total = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) total = __fadd_rn(total, parts[i]);
  *sum = total;
}

__global__ void never_cleared(unsigned* out) {
  __shared__ unsigned room[32];
  atomicAdd(&room[threadIdx.x], 1u);
  __syncthreads();
  out[threadIdx.x] = room[threadIdx.x];
}

__global__ void divergent_barrier(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
    out[threadIdx.x] = 1;
  } else {
    out[threadIdx.x] = 2;
    __syncthreads();
  }
}

__global__ void lanes_that_never_come(unsigned* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
}

__global__ void misaligned(const float* x, float* out) {
  out[threadIdx.x] = reinterpret_cast<const float4*>(x + 1)->x;
}
