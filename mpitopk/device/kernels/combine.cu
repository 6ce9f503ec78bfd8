// Two sparse messages of a plan added up, and cut down to the plan's counts again. Where a list of k entries
// has a group's from `offset` on, the sum has 2 `count` slots from 2 `offset` on: what both messages hold,
// ascending, and then empty ones, so that an exact selection (select.cu) among slots finds the winners.
//
//   common        are their indices in order and in their groups; which of mine are also theirs
//   add, add_dense
//                 the sum in its slots; dense values
//   split         winners to the message, the others apart
//   put_back      values to where they came from
//
// For messages of k: common reads 4 k, and 4 k log k of what is mostly in the caches, so does add, which reads
// 16 k more and writes 16 k; split reads 20 k and writes 12 k.
#include "common.cuh"

// The first of n ascending indices that is not below x.
__device__ inline unsigned place_of(const unsigned* indices, unsigned n, unsigned x) {
  unsigned first = 0;
  unsigned last = n;
  while (first < last) {
    const unsigned middle = first + (last - first) / 2;
    if (indices[middle] < x) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first;
}

__device__ inline bool holds(const unsigned* indices, unsigned n, unsigned x) {
  const unsigned at = place_of(indices, n, x);
  return at < n && indices[at] == x;
}

// The group of an entry, of rows (start, stop, offset).
__device__ inline const long long* group_of(const long long* groups, int n_groups, unsigned entry) {
  int first = 0;
  int last = n_groups;
  while (last - first > 1) {
    const int middle = (first + last) / 2;
    if (groups[3 * middle + 2] <= entry) {
      first = middle;
    } else {
      last = middle;
    }
  }
  return groups + 3 * first;
}

// How many of the first i of mine are also theirs: within stretches, and of the stretches before.
struct Before {
  const unsigned* inside;
  const unsigned* stretches;

  __device__ unsigned operator()(unsigned i) const { return inside[i] + stretches[i / STRETCH]; }
};

// One block for each stretch of k + 1 entries. `wrong` gets a 1 if their indices cannot be right.
__global__ void __launch_bounds__(THREADS) common(const unsigned* mine, const unsigned* theirs, unsigned k,
                                                  const long long* groups, int n_groups, unsigned* inside,
                                                  unsigned* stretches, unsigned* wrong, unsigned* finished,
                                                  unsigned long long* total) {
  __shared__ bool is_last;
  unsigned before = 0;
  for (unsigned first = 0; first < STRETCH; first += THREADS) {
    const unsigned i = blockIdx.x * STRETCH + first + threadIdx.x;
    unsigned all;
    const unsigned at = before + block_prefix(i < k && holds(theirs, k, mine[i]) ? 1 : 0, all);
    if (i <= k) inside[i] = at;
    before += all;
    if (i < k) {
      const long long* group = group_of(groups, n_groups, i);
      const bool there = theirs[i] >= group[0] && theirs[i] < group[1];
      if (!there || (i + 1 < k && theirs[i] >= theirs[i + 1])) atomicOr(wrong, 1u);
    }
  }
  if (threadIdx.x == 0) {
    stretches[blockIdx.x] = before;
    __threadfence();
    is_last = atomicAdd(finished, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (is_last) make_offsets(stretches, gridDim.x, total);
}

// Slots are zero before; a slot's index is written as one more, so that 0 stands for an empty one.
__global__ void __launch_bounds__(THREADS) add(const unsigned* mine, const float* my_values, const unsigned* theirs,
                                               const float* their_values, unsigned k, const long long* groups,
                                               int n_groups, const unsigned* inside, const unsigned* stretches,
                                               const unsigned* wrong, unsigned* slots, float* sums) {
  if ((*wrong & 1u) != 0) return;
  const Before before{inside, stretches};
  const long long threads = static_cast<long long>(gridDim.x) * THREADS;
  for (long long n = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x; n < 2ll * k; n += threads) {
    const bool is_mine = n < k;
    const auto entry = static_cast<unsigned>(is_mine ? n : n - k);
    const unsigned* others = is_mine ? theirs : mine;
    const unsigned index = is_mine ? mine[entry] : theirs[entry];
    float value = is_mine ? my_values[entry] : their_values[entry];
    const unsigned at = place_of(others, k, index);
    if (at < k && others[at] == index) {
      if (!is_mine) continue;
      value = __fadd_rn(value, their_values[at]);
    }
    const auto first = static_cast<unsigned>(group_of(groups, n_groups, entry)[2]);
    const unsigned doubles = before(is_mine ? entry : at) - before(first);
    const unsigned slot = entry + at - doubles;
    slots[slot] = index + 1;
    sums[slot] = value;
  }
}

// `out` may be `mine`. `wrong` gets a 2 if a sum is too large.
__global__ void __launch_bounds__(THREADS) add_dense(const float* mine, const float* theirs, float* out, long long n,
                                                     unsigned* wrong) {
  unsigned most = 0;
  const long long threads = static_cast<long long>(gridDim.x) * THREADS;
  for (long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x; i < n; i += threads) {
    out[i] = __fadd_rn(mine[i], theirs[i]);
    most = max(most, key_of(out[i]));
  }
  if (most >= TOO_LARGE) atomicOr(wrong, 2u);
}

// `winners`: the k slots that were selected.
__global__ void __launch_bounds__(THREADS) split(const unsigned* slots, const float* sums, const unsigned* winners,
                                                 unsigned k, unsigned* out, unsigned* dropped, float* dropped_values) {
  const long long threads = static_cast<long long>(gridDim.x) * THREADS;
  for (long long n = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x; n < 2ll * k; n += threads) {
    const auto slot = static_cast<unsigned>(n);
    const unsigned at = place_of(winners, k, slot);
    if (at < k && winners[at] == slot) {
      out[at] = slots[slot] - 1;
    } else {
      dropped[slot - at] = slots[slot] - 1;
      dropped_values[slot - at] = sums[slot];
    }
  }
}

__global__ void __launch_bounds__(THREADS) put_back(float* x, const unsigned* indices, const float* values,
                                                    long long count, const unsigned* winners, unsigned k, int among) {
  const long long threads = static_cast<long long>(gridDim.x) * THREADS;
  for (long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x; i < count; i += threads) {
    const unsigned index = indices[i];
    if (index == ~0u) continue;
    if (holds(winners, k, index) == (among != 0)) x[index] = __fadd_rn(x[index], values[i]);
  }
}
