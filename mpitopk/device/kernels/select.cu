// Exact selection of the largest magnitudes, fused with error feedback.
//
//   window   where the k-th of each group will lie, from a sample
//   scan     one pass over everything: accumulate, and write the candidates aside in the order of indices
//   refine   the k-th magnitude among the few candidates, and where the winners of each tile go
//   emit     winners to their places, ascending by index
//
// For n entries of 4 bytes, k winners and c candidates (1.1 to 2.5 k): window reads 8 n / 64, but at most
// 256 KiB, scan reads 8 n and writes 4 n + 8 c, refine reads 4 c, emit reads 4 c + 4 k and writes 8 k, and
// up to 4 k to the accumulator.
// Where the window was missed, or held too many candidates, full.cu selects without one.
#include "select.cuh"

// Line m of the sample begins somewhere in the m-th of equal parts.
constexpr long long LINE = 8;
constexpr long long LINES_APART = 64;
constexpr long long MOST_LINES = 4096;
constexpr long long SMALLEST = 4096;  // with fewer entries all are candidates

__device__ inline long long sample_line(long long m, long long stride) {
  const unsigned jitter = (static_cast<unsigned>(m) * 2654435761u) >> 8;
  return m * stride + jitter % (stride - LINE);
}

template <class G>
__device__ inline float accumulated(const G* gradient, const float* residual, long long i) {
  const float x = widen(gradient[i]);
  return residual == nullptr ? x : __fadd_rn(residual[i], x);
}

// Count a sample of the group in bins from `base` on; return its size, the same in all threads.
template <class G>
__device__ inline unsigned sample(const G* gradient, const float* residual, const Tile* tiles, const Group& group,
                                  unsigned base, unsigned shift, unsigned* bins) {
  const long long lines = max(64ll, min(MOST_LINES, group.size / (LINES_APART * LINE)));
  const long long stride = group.size / lines;
  unsigned looked_at = 0;
  for (long long m = threadIdx.x / LINE; m < lines; m += blockDim.x / LINE) {
    const long long position = sample_line(m, stride);
    int t = group.first_tile + static_cast<int>(position / TILE);
    while (position >= tiles[t].before + tiles[t].size) ++t;
    const long long inside = position - tiles[t].before + threadIdx.x % LINE;
    if (inside >= tiles[t].size) continue;
    ++looked_at;
    const unsigned key = key_of(accumulated(gradient, residual, tiles[t].start + inside));
    if (key >= base) atomicAdd(&bins[min((key - base) >> shift, BINS - 1)], 1u);
  }
  unsigned total;
  block_prefix(looked_at, total);
  return total;
}

// One block for each group; without groups one block, that resets the status.
template <class G>
__global__ void __launch_bounds__(1024) window(const G* gradient, const float* residual, const Tile* tiles,
                                               const Group* groups, int n_groups, State* states,
                                               Gathered* gathered, Status* status, unsigned* histograms) {
  __shared__ unsigned bins[BINS];
  if (blockIdx.x == 0 && threadIdx.x == 0) *status = Status{0, 0, 0};
  if (n_groups == 0) return;
  const Group group = groups[blockIdx.x];
  State* state = states + blockIdx.x;
  unsigned* histogram = histograms + static_cast<size_t>(blockIdx.x) * BINS;
  unsigned base = state->floor;
  unsigned low = 0;
  unsigned sure = NONE;
  for (unsigned i = threadIdx.x; i < BINS; i += blockDim.x) histogram[i] = 0;
  while (group.size >= SMALLEST) {
    // From a floor four octaves are enough, in fine bins; without one coarse bins hold every magnitude.
    const unsigned shift = base > 0 ? 13 : 31 - BIN_BITS;
    for (unsigned i = threadIdx.x; i < BINS; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    const unsigned looked_at = sample(gradient, residual, tiles, group, base, shift, bins);
    __syncthreads();
    // Five standard deviations of the rank.
    const float rank = static_cast<float>(group.count) / static_cast<float>(group.size) * static_cast<float>(looked_at);
    const float margin = 5.0f * sqrtf(rank) + 3.0f;
    if (rank + margin < static_cast<float>(looked_at)) {
      const Bin lowest = find_bin(bins, static_cast<unsigned>(rank + margin));
      if (base > 0 && lowest.index >= BINS - 1) {  // below the floor, or far above it
        base = 0;
        continue;
      }
      if (lowest.index < BINS) low = min(base + (lowest.index << shift), TOO_LARGE);
    }
    if (rank - margin >= 1.0f) {
      const Bin highest = find_bin(bins, static_cast<unsigned>(rank - margin));
      if (highest.index < BINS - 1) sure = base + ((highest.index + 1) << shift);
    }
    break;
  }
  if (threadIdx.x != 0) return;
  const unsigned widest = sure - low - 1;
  const unsigned shift = widest < BINS ? 0u : 32u - BIN_BITS - static_cast<unsigned>(__clz(static_cast<int>(widest)));
  *state = State{low, sure, shift, 0, 0, 0, 0, 0, 0, state->floor};
  gathered[blockIdx.x] = Gathered{0, 0, ALL, 0};
}

struct alignas(16) Four {
  float x[4];
};
template <class G>
struct alignas(4 * sizeof(G)) FourOf {
  G x[4];
};

// Entries i to i + 3 of residual + gradient; bit c says whether entry i + c belongs to the tile.
template <class G>
__device__ inline unsigned load(const G* gradient, const float* residual, long long i, const Tile& tile, bool aligned,
                                Four& four) {
  const long long stop = tile.start + tile.size;
  if (aligned && i >= tile.start && i + 4 <= stop) {
    const FourOf<G> g = *reinterpret_cast<const FourOf<G>*>(gradient + i);
    Four r = {{0, 0, 0, 0}};
    if (residual != nullptr) r = *reinterpret_cast<const Four*>(residual + i);
    for (int c = 0; c < 4; ++c) {
      four.x[c] = residual == nullptr ? widen(g.x[c]) : __fadd_rn(r.x[c], widen(g.x[c]));
    }
    return 15u;
  }
  unsigned inside = 0;
  for (int c = 0; c < 4; ++c) {
    const bool here = i + c >= tile.start && i + c < stop;
    four.x[c] = here ? accumulated(gradient, residual, i + c) : 0.0f;
    inside |= static_cast<unsigned>(here) << c;
  }
  return inside;
}

__device__ inline void store(float* out, long long i, unsigned inside, const Four& four) {
  if (inside == 15u) {
    *reinterpret_cast<Four*>(out + i) = four;
    return;
  }
  for (int c = 0; c < 4; ++c) {
    if ((inside >> c & 1u) != 0) out[i + c] = four.x[c];
  }
}

// One block for each tile. `residual` null: the gradient alone; `out` null: nothing is accumulated.
// `out` and `residual` begin at multiples of 16 bytes; `capacity`: candidates that there is room for.
template <class G>
__global__ void __launch_bounds__(THREADS, 4) scan(const G* gradient, const float* residual, float* out,
                                                   const Tile* tiles, Found* found, State* states, Status* status,
                                                   unsigned* histograms, unsigned* candidates, float* values,
                                                   unsigned capacity) {
  __shared__ unsigned hits_of[WARPS], certain_of[WARPS], bad_of[WARPS], begin;
  const Tile tile = tiles[blockIdx.x];
  const bool dense = tile.group < 0;
  State* state = states + (dense ? 0 : tile.group);
  const unsigned low = dense ? NONE : state->low;
  const unsigned sure = dense ? NONE : state->sure;
  const bool aligned = reinterpret_cast<size_t>(gradient) % (4 * sizeof(G)) == 0;
  const long long first = ((tile.start >> 2) + warp() * (32 * VECTORS) + lane()) << 2;

  Four x[VECTORS];
  unsigned inside[VECTORS];
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) inside[j] = load(gradient, residual, first + 128 * j, tile, aligned, x[j]);
  unsigned hits = 0;  // bit 4 j + c
  unsigned certain = 0;
  unsigned most = 0;
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    for (int c = 0; c < 4; ++c) {
      const unsigned key = key_of(x[j].x[c]);
      const bool valid = (inside[j] >> c & 1u) != 0;
      hits |= static_cast<unsigned>(valid && key >= low) << (4 * j + c);
      certain += key >= sure;
      most = max(most, key);
    }
  }
  const unsigned warp_hits = warp_sum(static_cast<unsigned>(__popc(hits)));
  const unsigned warp_certain = warp_sum(certain);
  const bool warp_bad = __any_sync(ALL, most >= TOO_LARGE);
  if (lane() == 0) {
    hits_of[warp()] = warp_hits;
    certain_of[warp()] = warp_certain;
    bad_of[warp()] = warp_bad;
  }
  __syncthreads();
  unsigned before = 0, total = 0, total_certain = 0, bad = 0;
  for (unsigned w = 0; w < WARPS; ++w) {
    if (w == warp()) before = total;
    total += hits_of[w];
    total_certain += certain_of[w];
    bad |= bad_of[w];
  }
  if (bad != 0) {
    if (threadIdx.x == 0) atomicOr(&status->nonfinite, 1u);
    return;
  }
  if (threadIdx.x == 0 && !dense) {
    begin = total > 0 ? atomicAdd(&status->cursor, total) : 0;
    const bool room = begin <= capacity && total <= capacity - begin;
    if (!room) begin = NONE;
    found[blockIdx.x] = Found{begin, room ? total : 0, 0, 0, 0};
    if (total > 0) {
      atomicAdd(&state->candidates, total);
      atomicAdd(&state->certain, total_certain);
      if (!room) atomicOr(&state->overflow, 1u);
    }
  }
  __syncthreads();
  const bool room = dense || begin != NONE;
  if (out != nullptr) {
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      Four kept = x[j];
      for (int c = 0; c < 4; ++c) {
        if (room && key_of(kept.x[c]) >= sure) kept.x[c] = 0.0f;
      }
      store(out, first + 128 * j, inside[j], kept);
    }
  }
  if (!room || warp_hits == 0) return;
  unsigned to = begin + before;
  unsigned* histogram = histograms + static_cast<size_t>(tile.group) * BINS;
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    const unsigned mine = hits >> (4 * j) & 15u;
    if (!__any_sync(ALL, mine != 0)) continue;
    unsigned at = to;
    const auto count = static_cast<unsigned>(__popc(mine));
    for (unsigned bit = 0; bit < 3; ++bit) {
      const unsigned ballot = __ballot_sync(ALL, count >> bit & 1u);
      at += static_cast<unsigned>(__popc(ballot & lanes_before())) << bit;
      to += static_cast<unsigned>(__popc(ballot)) << bit;
    }
    for (int c = 0; c < 4; ++c) {
      if ((mine >> c & 1u) == 0) continue;
      const float value = x[j].x[c];
      const unsigned key = key_of(value);
      candidates[at] = static_cast<unsigned>(first + 128 * j + c);
      values[at++] = value;
      if (key < sure) atomicAdd(&histogram[(key - low) >> state->shift], 1u);
    }
  }
}

// What is in the bin of the k-th, by the warps of the block; tiles first <= t < last of one group.
__device__ inline void look_into_bin(const State& state, unsigned bin, int first, int last, Found* found,
                                     const float* values, Gathered* gathered, Listed* list) {
  const unsigned lowest = state.low + (bin << state.shift);
  const unsigned highest = min(state.sure - 1, lowest + ((1u << state.shift) - 1));
  for (int t = first + static_cast<int>(warp()); t < last; t += WARPS) {
    const unsigned begin = found[t].begin;
    const unsigned count = found[t].count;
    unsigned above = 0, ties = 0, least = ALL, most = 0;
    for (unsigned i = 0; i < count; i += 32) {
      const unsigned key = i + lane() < count ? key_of(values[begin + i + lane()]) : 0;
      above += key > highest;
      const bool here = i + lane() < count && key >= lowest && key <= highest;
      const unsigned ballot = __ballot_sync(ALL, here);
      if (ballot == 0) continue;
      unsigned at = 0;
      if (lane() == 0) at = atomicAdd(&gathered->listed, static_cast<unsigned>(__popc(ballot)));
      at = __shfl_sync(ALL, at, 0) + static_cast<unsigned>(__popc(ballot & lanes_before()));
      if (!here) continue;
      ++ties;
      least = min(least, key);
      most = max(most, key);
      if (at < LIST) list[at] = Listed{key, t};
    }
    above = warp_sum(above);
    ties = warp_sum(ties);
    if (least <= most) {
      atomicMin(&gathered->least, least);
      atomicMax(&gathered->most, most);
    }
    if (lane() == 0) {
      found[t].above = above;
      found[t].ties = ties;
    }
  }
}

// The magnitude that is rank-th largest in the list, by all threads; in the tiles what is greater is
// counted with `above`, and with `ties` only its equals.
__device__ inline unsigned kth_of_list(const Listed* list, unsigned size, unsigned rank, Found* found) {
  __shared__ unsigned result;
  for (unsigned e = threadIdx.x; e < size; e += blockDim.x) {
    unsigned greater = 0, equal = 0;
    for (unsigned other = 0; other < size; ++other) {
      greater += list[other].key > list[e].key;
      equal += list[other].key == list[e].key && other < e;
    }
    if (greater + equal == rank - 1) result = list[e].key;
  }
  __syncthreads();
  const unsigned kth = result;
  for (unsigned e = threadIdx.x; e < size; e += blockDim.x) {
    if (list[e].key == kth) continue;
    atomicSub(&found[list[e].tile].ties, 1u);
    if (list[e].key > kth) atomicAdd(&found[list[e].tile].above, 1u);
  }
  __syncthreads();
  return kth;
}

// Each block looks at `per_block` tiles, those with groups only; the one that ends a group settles it.
__global__ void __launch_bounds__(THREADS) refine(const Tile* tiles, const Group* groups, Found* found, State* states,
                                                  Gathered* gathered, Status* status, unsigned* histograms,
                                                  const float* values, Listed* lists, int n_tiles, int per_block) {
  __shared__ bool is_last;
  if (status->nonfinite != 0) return;
  const int end = min(n_tiles, (static_cast<int>(blockIdx.x) + 1) * per_block);
  for (int first = static_cast<int>(blockIdx.x) * per_block; first < end;) {
    const int g = tiles[first].group;
    const Group group = groups[g];
    const State state = states[g];
    Gathered* all = gathered + g;
    unsigned* histogram = histograms + static_cast<size_t>(g) * BINS;
    Listed* list = lists + static_cast<size_t>(g) * LIST;
    const int last = min(end, group.last_tile);
    const bool fits = state.overflow == 0 && state.certain < group.count && state.candidates >= group.count;
    Bin bin = {0, 0};
    if (fits) {
      bin = find_bin(histogram, group.count - state.certain);
      look_into_bin(state, bin.index, first, last, found, values, all, list);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const auto mine = static_cast<unsigned>(last - first);
      __threadfence();
      is_last = atomicAdd(&all->tiles, mine) + mine == static_cast<unsigned>(group.last_tile - group.first_tile);
      __threadfence();
    }
    __syncthreads();
    if (is_last) {
      const bool alike = all->least == all->most;
      if (fits && (alike || all->listed <= LIST)) {
        const unsigned rank = group.count - state.certain - bin.above;
        const unsigned kth = alike ? all->least : kth_of_list(list, all->listed, rank, found);
        share(group, found);
        if (threadIdx.x == 0) {
          states[g].kth = kth;
          states[g].floor = floor_below(kth);
        }
      } else {
        for (unsigned i = threadIdx.x; i < BINS; i += blockDim.x) histogram[i] = 0;
        if (threadIdx.x == 0) {
          states[g].missed = 1;
          states[g].wanted = group.count;
          atomicAdd(&status->missed, 1u);
        }
      }
    }
    __syncthreads();
    first = last;
  }
}

// One warp for each tile with a group. `out` not null: winners below `sure` are set to zero there, too.
__global__ void __launch_bounds__(THREADS) emit(const Tile* tiles, const Found* found, const State* states,
                                                const Status* status, const unsigned* candidates, const float* values,
                                                float* out, unsigned* indices, float* winners, int n_tiles) {
  const int t = static_cast<int>(blockIdx.x) * WARPS + static_cast<int>(warp());
  if (t >= n_tiles || status->nonfinite != 0) return;
  const State state = states[tiles[t].group];
  if (state.missed != 0) return;
  const Found tile = found[t];
  unsigned to = tile.offset;
  unsigned ties_before = 0;
  for (unsigned i = 0; i < tile.count; i += 32) {
    const bool here = i + lane() < tile.count;
    const float value = here ? values[tile.begin + i + lane()] : 0.0f;
    const unsigned key = key_of(value);
    const bool tie = here && key == state.kth;
    const unsigned ties = __ballot_sync(ALL, tie);
    const unsigned rank = ties_before + static_cast<unsigned>(__popc(ties & lanes_before()));
    const bool wins = here && (key > state.kth || (tie && rank < tile.ties));
    const unsigned winning = __ballot_sync(ALL, wins);
    if (wins) {
      const unsigned index = candidates[tile.begin + i + lane()];
      const unsigned at = to + static_cast<unsigned>(__popc(winning & lanes_before()));
      indices[at] = index;
      winners[at] = value;
      if (out != nullptr && key < state.sure) out[index] = 0.0f;
    }
    ties_before += static_cast<unsigned>(__popc(ties));
    to += static_cast<unsigned>(__popc(winning));
  }
}
