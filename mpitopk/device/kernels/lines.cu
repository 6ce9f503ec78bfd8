// Blocks of entries, each rounded to a multiple of a vector of a codebook.
//
//   nearest_lines   accumulate; the branch and then the line of each block, its coefficient, the scale of each group
//   pack_lines      the code; what it stands for is subtracted
//   merge_lines     the sum of the codes of all ranks, in rank order, over the divisor
//
// A code: scales, bit planes of the numbers of the lines, coefficients (see mpitopk/lines.py). For n entries, b
// branches and m vectors in each nearest_lines reads 8 n and writes 4 n, and takes n (b + m) products, a warp b of
// TOGETHER blocks at once. merge_lines writes 4 n.
#include "common.cuh"

constexpr int LINE_GROUP = 1024;  // blocks that share a scale
constexpr int LONGEST = 64;       // entries of the longest block
constexpr int TOGETHER = 8;       // blocks that a warp looks at

struct Nearest {
  float size = -1.0f;
  float product = 0.0f;
  int number = 0;
};

__device__ inline int up_to_warps(int count) { return (count + 31) / 32 * 32; }

// For each of R blocks, the first of `count` vectors with the largest |product|: for all threads of the warp. Entry j
// of block r is x[j * TOGETHER + r]; `columns` are filled up with zeros to whole warps.
template <int R>
__device__ inline void look(const float* x, int block, const float* columns, int count, Nearest* best) {
  const int stride = up_to_warps(count);
  for (int k = static_cast<int>(lane()); k < stride; k += 32) {
    float sums[R] = {};
    for (int j = 0; j < block; ++j) {
      const float c = columns[j * stride + k];
#pragma unroll
      for (int r = 0; r < R; ++r) sums[r] = __fadd_rn(sums[r], __fmul_rn(x[j * TOGETHER + r], c));
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (fabsf(sums[r]) > best[r].size) {
        best[r].size = fabsf(sums[r]);
        best[r].product = sums[r];
        best[r].number = k;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    for (int by = 16; by > 0; by /= 2) {
      const float size = __shfl_xor_sync(ALL, best[r].size, by);
      const float product = __shfl_xor_sync(ALL, best[r].product, by);
      const int number = __shfl_xor_sync(ALL, best[r].number, by);
      if (size > best[r].size || (size == best[r].size && number < best[r].number)) {
        best[r].size = size;
        best[r].product = product;
        best[r].number = number;
      }
    }
  }
}

// `branches`: the representatives as columns; `lines`: the vectors of each branch as columns; `scales`: zero before.
template <class G>
__global__ void __launch_bounds__(THREADS) nearest_lines(const G* gradient, const float* residual, float* out,
                                                         long long n, int block, const float* branches, int count,
                                                         const float* lines, int members, unsigned short* numbers,
                                                         float* products, unsigned* scales, unsigned* flag) {
  __shared__ float entries[WARPS][LONGEST * TOGETHER];
  float* x = entries[warp()];
  const long long first = (blockIdx.x * static_cast<long long>(WARPS) + warp()) * TOGETHER;
  unsigned top = 0;
  for (int i = static_cast<int>(lane()); i < TOGETHER * block; i += 32) {
    const long long at = first * block + i;
    float sum = 0;
    if (at < n) {
      sum = __fadd_rn(residual[at], widen(gradient[at]));
      out[at] = sum;
    }
    x[i % block * TOGETHER + i / block] = sum;
    top = max(top, key_of(sum));
  }
  __syncwarp();
  Nearest branch[TOGETHER];
  look<TOGETHER>(x, block, branches, count, branch);
  int mine = 0;
  float product = 0;
#pragma unroll
  for (int r = 0; r < TOGETHER; ++r) {
    Nearest line;
    look<1>(x + r, block, lines + branch[r].number * block * up_to_warps(members), members, &line);
    if (lane() == r) {
      mine = branch[r].number * members + line.number;
      product = line.product;
    }
  }
  const long long i = first + lane();
  if (lane() < TOGETHER && i * block < n) {
    numbers[i] = static_cast<unsigned short>(mine);
    products[i] = product;
    atomicMax(&scales[i / LINE_GROUP], key_of(product));
  }
  if (top >= TOO_LARGE) atomicOr(flag, 1u);
}

__device__ inline float step_of(float scale, int hinge_bytes) {
  return __fdiv_rn(scale, hinge_bytes == 1 ? 127.0f : 32767.0f);
}

// A thread for each block, a warp for each word of a bit plane. `hinges`: whole numbers of one or two bytes.
__global__ void __launch_bounds__(THREADS) pack_lines(float* out, long long n, int block, const float* vectors,
                                                      int bits, const unsigned short* numbers, const float* products,
                                                      const float* scales, unsigned* planes, unsigned char* hinges,
                                                      int hinge_bytes) {
  const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
  const bool here = i * block < n;
  const unsigned number = here ? numbers[i] : 0;
  for (int b = 0; b < bits; ++b) {
    const unsigned word = __ballot_sync(ALL, (number >> b & 1u) != 0);
    if (lane() == 0 && here) planes[i / 32 * bits + b] = word;
  }
  if (!here) return;
  const float scale = scales[i / LINE_GROUP];
  float steps = 0;
  if (scale > 0.0f) {
    steps = rintf(__fmul_rn(__fdiv_rn(products[i], scale), hinge_bytes == 1 ? 127.0f : 32767.0f));
  }
  if (hinge_bytes == 1) {
    hinges[i] = static_cast<unsigned char>(static_cast<signed char>(steps));
  } else {
    reinterpret_cast<short*>(hinges)[i] = static_cast<short>(steps);
  }
  const float coefficient = __fmul_rn(steps, step_of(scale, hinge_bytes));
  for (long long at = i * block; at < min(n, (i + 1) * block); ++at) {
    out[at] = __fsub_rn(out[at], __fmul_rn(coefficient, vectors[number * block + (at - i * block)]));
  }
}

// A thread for each entry. `starts`: where the code of each rank begins, in bytes; `planes_at`, `hinges_at`: where in
// it the bit planes and coefficients do, in words.
__global__ void __launch_bounds__(THREADS) merge_lines(const unsigned char* buffer, const long long* starts, int ranks,
                                                       long long planes_at, long long hinges_at, long long n,
                                                       int block, const float* vectors, int bits, int hinge_bytes,
                                                       float divisor, float* out) {
  const long long at = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
  if (at >= n) return;
  const long long i = at / block;
  const int j = static_cast<int>(at % block);
  float sum = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const unsigned* words = reinterpret_cast<const unsigned*>(buffer + starts[rank]);
    const unsigned* planes = words + planes_at + i / 32 * bits;
    unsigned number = 0;
    for (int b = 0; b < bits; ++b) number |= (planes[b] >> (i % 32) & 1u) << b;
    const float scale = reinterpret_cast<const float*>(words)[i / LINE_GROUP];
    const float steps = hinge_bytes == 1 ? reinterpret_cast<const signed char*>(words + hinges_at)[i]
                                         : reinterpret_cast<const short*>(words + hinges_at)[i];
    const float coefficient = __fmul_rn(steps, step_of(scale, hinge_bytes));
    sum = __fadd_rn(sum, __fmul_rn(coefficient, vectors[number * block + j]));
  }
  out[at] = __fdiv_rn(sum, divisor);
}
