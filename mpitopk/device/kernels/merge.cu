// The sum of the messages of all ranks, in rank order and without float atomics: each block owns a stretch of
// the result and adds what the messages hold of it, one rank after the other.
//
//   check     are the indices of every message ascending and in range
//   merge     the sum over the divisor, zeros where no message holds anything
//   merge_count, merge_write
//           the same as indices and values, only where some message holds something
//
// For n entries and P messages of k: check reads 4 k P; merge reads 8 k P and writes 4 n.
#include "common.cuh"

constexpr int STRETCH = 4096;

// The messages, at `starts` in one buffer: a header, `counts` indices, and values of those and of the dense
// pieces; `pieces`: rows (start, stop, position among the dense values).
struct Messages {
  const unsigned char* buffer;
  const long long* starts;
  const long long* counts;
  const long long* pieces;
  int ranks;
  int n_pieces;
};

template <class V>
struct Message {
  const unsigned* indices;
  const V* values;
  long long count;

  __device__ Message(const Messages& all, int rank) : count(all.counts[rank]) {
    const unsigned char* at = all.buffer + all.starts[rank] + HEADER;
    indices = reinterpret_cast<const unsigned*>(at);
    values = reinterpret_cast<const V*>(at + ((4 * count + 7) & ~7ll));
  }

  // The first place whose index is not below i.
  __device__ long long place(long long i) const {
    long long first = 0;
    long long last = count;
    while (first < last) {
      const long long middle = (first + last) / 2;
      if (indices[middle] < i) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first;
  }
};

// `wrong` receives `ranks` less the lowest rank whose message has wrong indices; 0 stays if there is none.
__global__ void __launch_bounds__(THREADS) check(const unsigned char* buffer, const long long* starts,
                                                 const long long* counts, int ranks, long long n, unsigned* wrong) {
  const Messages all{buffer, starts, counts, nullptr, ranks, 0};
  const long long threads = static_cast<long long>(gridDim.x) * THREADS;
  for (int rank = 0; rank < ranks; ++rank) {
    const Message<float> message(all, rank);
    for (long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x; i < message.count; i += threads) {
      const long long next = i + 1 < message.count ? message.indices[i + 1] : n;
      if (message.indices[i] >= next) atomicMax(wrong, static_cast<unsigned>(ranks - rank));
    }
  }
}

// The first dense piece that ends after entry i.
__device__ inline int first_piece(const Messages& all, long long i) {
  int first = 0;
  int last = all.n_pieces;
  while (first < last) {
    const int middle = (first + last) / 2;
    if (all.pieces[3 * middle + 1] <= i) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first;
}

// Sum what the messages hold of entries start to start + STRETCH, by all threads of the block.
template <class V>
__device__ inline void sum_stretch(const Messages& all, long long start, long long n, float* sum, unsigned char* held) {
  const long long stop = min(n, start + STRETCH);
  for (int i = static_cast<int>(threadIdx.x); i < STRETCH; i += THREADS) {
    sum[i] = 0.0f;
    held[i] = 0;
  }
  __syncthreads();
  __shared__ long long first[THREADS], last[THREADS];
  const int piece_here = first_piece(all, start);
  for (int base = 0; base < all.ranks; base += THREADS) {
    const int mine = base + static_cast<int>(threadIdx.x);
    if (mine < all.ranks) {
      const Message<V> message(all, mine);
      first[threadIdx.x] = message.place(start);
      last[threadIdx.x] = message.place(stop);
    }
    __syncthreads();
    for (int rank = base; rank < min(all.ranks, base + THREADS); ++rank) {
      const Message<V> message(all, rank);
      const long long end = last[rank - base];
      for (long long i = first[rank - base] + threadIdx.x; i < end; i += THREADS) {
        const auto at = static_cast<int>(message.indices[i] - start);
        sum[at] = __fadd_rn(sum[at], widen(message.values[i]));
        held[at] = 1;
      }
      for (int p = piece_here; p < all.n_pieces && all.pieces[3 * p] < stop; ++p) {
        const long long* piece = all.pieces + 3 * p;
        const long long from = max(start, piece[0]);
        const long long to = min(stop, piece[1]);
        const V* values = message.values + message.count + (piece[2] - piece[0]);
        for (long long i = from + threadIdx.x; i < to; i += THREADS) {
          const auto at = static_cast<int>(i - start);
          sum[at] = __fadd_rn(sum[at], widen(values[i]));
          held[at] = 1;
        }
      }
      __syncthreads();
    }
  }
}

// One block for each stretch. Nothing is written if a message is wrong. `total` receives how many entries
// some message holds.
template <class V>
__global__ void __launch_bounds__(THREADS) merge(const unsigned char* buffer, const long long* starts,
                                                 const long long* counts, int ranks, const long long* pieces,
                                                 int n_pieces, float divisor, float* out, long long n,
                                                 const unsigned* wrong, unsigned long long* total) {
  __shared__ float sum[STRETCH];
  __shared__ unsigned char held[STRETCH];
  if (*wrong != 0) return;
  const long long start = blockIdx.x * static_cast<long long>(STRETCH);
  sum_stretch<V>({buffer, starts, counts, pieces, ranks, n_pieces}, start, n, sum, held);
  unsigned mine = 0;
  for (int i = static_cast<int>(threadIdx.x); i < STRETCH && start + i < n; i += THREADS) {
    out[start + i] = held[i] != 0 ? __fdiv_rn(sum[i], divisor) : 0.0f;
    mine += held[i];
  }
  unsigned all;
  block_prefix(mine, all);
  if (threadIdx.x == 0 && all > 0) atomicAdd(total, static_cast<unsigned long long>(all));
}

// Sizes become offsets, and `total` their sum; by all threads of a block.
__device__ inline void make_offsets(unsigned* sizes, unsigned n_sizes, unsigned long long* total) {
  unsigned before = 0;
  for (unsigned first = 0; first < n_sizes; first += THREADS) {
    const unsigned i = first + threadIdx.x;
    const unsigned mine = i < n_sizes ? sizes[i] : 0;
    unsigned all;
    const unsigned offset = before + block_prefix(mine, all);
    if (i < n_sizes) sizes[i] = offset;
    before += all;
  }
  if (threadIdx.x == 0) *total = before;
}

// One block for each stretch: how many of its entries some message holds. The block that is the last to end
// makes offsets of that.
template <class V>
__global__ void __launch_bounds__(THREADS) merge_count(const unsigned char* buffer, const long long* starts,
                                                       const long long* counts, int ranks, const long long* pieces,
                                                       int n_pieces, long long n, const unsigned* wrong,
                                                       unsigned* finished, unsigned* sizes,
                                                       unsigned long long* total) {
  __shared__ float sum[STRETCH];
  __shared__ unsigned char held[STRETCH];
  __shared__ bool is_last;
  if (*wrong != 0) return;
  const long long start = blockIdx.x * static_cast<long long>(STRETCH);
  sum_stretch<V>({buffer, starts, counts, pieces, ranks, n_pieces}, start, n, sum, held);
  unsigned mine = 0;
  for (int i = static_cast<int>(threadIdx.x); i < STRETCH; i += THREADS) mine += held[i];
  unsigned all;
  block_prefix(mine, all);
  if (threadIdx.x == 0) {
    sizes[blockIdx.x] = all;
    __threadfence();
    is_last = atomicAdd(finished, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (is_last) make_offsets(sizes, gridDim.x, total);
}

template <class V>
__global__ void __launch_bounds__(THREADS) merge_write(const unsigned char* buffer, const long long* starts,
                                                 const long long* counts, int ranks, const long long* pieces,
                                                 int n_pieces, float divisor, long long n, const unsigned* wrong,
                                                 const unsigned* offsets, unsigned* indices, float* values) {
  __shared__ float sum[STRETCH];
  __shared__ unsigned char held[STRETCH];
  if (*wrong != 0) return;
  const long long start = blockIdx.x * static_cast<long long>(STRETCH);
  sum_stretch<V>({buffer, starts, counts, pieces, ranks, n_pieces}, start, n, sum, held);
  unsigned to = offsets[blockIdx.x];
  for (int first = 0; first < STRETCH; first += THREADS) {
    const int i = first + static_cast<int>(threadIdx.x);
    unsigned all;
    const unsigned at = to + block_prefix(held[i], all);
    if (held[i] != 0) {
      indices[at] = static_cast<unsigned>(start + i);
      values[at] = __fdiv_rn(sum[i], divisor);
    }
    to += all;
  }
}
