// Selection without a window: slower, and always right. Each kernel works on the groups that were missed.
//
//   restore       undo the zeros that `scan` has written
//   digit, pick   the k-th magnitude, 12, 12 and 7 bits at a time
//   tally         how many winners and ties each tile holds
//   settle        where they go
//   gather        winners to their places, ascending by index
//
// For n entries of 4 bytes each `digit`, tally and gather read 4 n; gather writes 8 k, and 4 k to clear.
// `draw` and the kernels after it do the same with entries drawn at random.
#include "select.cuh"

// One warp for each tile with a group.
__global__ void __launch_bounds__(THREADS) restore(const Tile* tiles, const Found* found, const State* states,
                                                   const unsigned* candidates, const float* values, float* out,
                                                   int n_tiles) {
  const int t = static_cast<int>(blockIdx.x) * WARPS + static_cast<int>(warp());
  if (t >= n_tiles || states[tiles[t].group].missed == 0) return;
  const unsigned sure = states[tiles[t].group].sure;
  for (unsigned i = found[t].begin + lane(); i < found[t].begin + found[t].count; i += 32) {
    if (key_of(values[i]) >= sure) out[candidates[i]] = values[i];
  }
}

// Count the next `bits` bits, at `shift`, of the magnitudes that are like the k-th in all higher bits.
__global__ void __launch_bounds__(THREADS) digit(const float* x, const Tile* tiles, const State* states,
                                                 unsigned* histograms, unsigned shift, unsigned bits) {
  __shared__ unsigned bins[BINS];
  const Tile tile = tiles[blockIdx.x];
  const State state = states[tile.group];
  if (state.missed == 0) return;
  for (unsigned i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
  __syncthreads();
  const unsigned mask = (1u << bits) - 1;
  for (int i = static_cast<int>(threadIdx.x); i < tile.size; i += THREADS) {
    const unsigned key = key_of(x[tile.start + i]);
    if ((key ^ state.kth) >> shift <= mask) atomicAdd(&bins[key >> shift & mask], 1u);
  }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < BINS; i += THREADS) {
    if (bins[i] != 0) atomicAdd(&histograms[static_cast<size_t>(tile.group) * BINS + i], bins[i]);
  }
}

// One block for each group.
__global__ void __launch_bounds__(THREADS) pick(State* states, unsigned* histograms, unsigned shift) {
  State* state = states + blockIdx.x;
  if (state->missed == 0) return;
  unsigned* histogram = histograms + static_cast<size_t>(blockIdx.x) * BINS;
  const Bin bin = find_bin(histogram, state->wanted);
  for (unsigned i = threadIdx.x; i < BINS; i += THREADS) histogram[i] = 0;
  if (threadIdx.x != 0) return;
  state->kth |= bin.index << shift;
  state->wanted -= bin.above;
}

// Which entries win: those above the k-th magnitude, and of its equals the first.
struct Largest {
  const float* x;
  unsigned kth;

  __device__ unsigned key(const Tile& tile, int i) const { return key_of(x[tile.start + i]); }
  __device__ bool wins(unsigned key) const { return key > kth; }
  __device__ bool ties(unsigned key) const { return key == kth; }
};

constexpr int ROUNDS = 6;

// Those whose place in a keyed permutation of the group's positions is below the count: a balanced Feistel
// network, run backwards, with cycle walking.
struct Drawn {
  const unsigned* round_keys;
  unsigned half;  // bits of a half
  unsigned long long size;
  unsigned long long count;

  __device__ unsigned key(const Tile& tile, int i) const {
    unsigned long long x = static_cast<unsigned long long>(tile.before + i);
    const unsigned mask = (1u << half) - 1;
    do {
      auto left = static_cast<unsigned>(x >> half);
      auto right = static_cast<unsigned>(x) & mask;
      for (int round = ROUNDS - 1; round >= 0; --round) {
        const unsigned before = right ^ (mixed(left ^ round_keys[round]) & mask);
        right = left;
        left = before;
      }
      x = static_cast<unsigned long long>(left) << half | right;
    } while (x >= size);
    return x < count;
  }
  __device__ bool wins(unsigned key) const { return key != 0; }
  __device__ bool ties(unsigned) const { return false; }
};

template <class Rule>
__device__ inline void tally_tile(const Rule& rule, const Tile& tile, Found& found) {
  unsigned above = 0, ties = 0;
  for (int i = static_cast<int>(threadIdx.x); i < tile.size; i += THREADS) {
    const unsigned key = rule.key(tile, i);
    above += rule.wins(key);
    ties += rule.ties(key);
  }
  unsigned all_above, all_ties;
  block_prefix(above, all_above);
  block_prefix(ties, all_ties);
  if (threadIdx.x != 0) return;
  found.above = all_above;
  found.ties = all_ties;
}

// By one warp. `x`, `values` and `clear` may be null: there is nothing to copy, or to set to zero.
template <class Rule>
__device__ inline void gather_tile(const Rule& rule, const Tile& tile, const Found& found, float* clear,
                                   const float* x, unsigned* indices, float* values) {
  unsigned to = found.offset;
  unsigned ties_before = 0;
  for (int first = 0; first < tile.size; first += 32) {
    const int i = first + static_cast<int>(lane());
    const bool here = i < tile.size;
    const unsigned key = here ? rule.key(tile, i) : 0;
    const bool tie = here && rule.ties(key);
    const unsigned ties = __ballot_sync(ALL, tie);
    const unsigned rank = ties_before + static_cast<unsigned>(__popc(ties & lanes_before()));
    const bool wins = here && (rule.wins(key) || (tie && rank < found.ties));
    const unsigned winning = __ballot_sync(ALL, wins);
    if (wins) {
      const unsigned at = to + static_cast<unsigned>(__popc(winning & lanes_before()));
      indices[at] = static_cast<unsigned>(tile.start + i);
      if (values != nullptr) values[at] = x[tile.start + i];
      if (clear != nullptr) clear[tile.start + i] = 0.0f;
    }
    ties_before += static_cast<unsigned>(__popc(ties));
    to += static_cast<unsigned>(__popc(winning));
  }
}

// One block for each tile.
__global__ void __launch_bounds__(THREADS) tally(const float* x, const Tile* tiles, Found* found, const State* states) {
  const Tile tile = tiles[blockIdx.x];
  const State state = states[tile.group];
  if (state.missed != 0) tally_tile(Largest{x, state.kth}, tile, found[blockIdx.x]);
}

// One block for each group.
__global__ void __launch_bounds__(THREADS) settle(const Group* groups, Found* found, State* states) {
  State* state = states + blockIdx.x;
  if (state->missed == 0) return;
  share(groups[blockIdx.x], found);
  if (threadIdx.x == 0) state->floor = floor_below(state->kth);
}

// One warp for each tile. With `clear` winners are set to zero in x.
__global__ void __launch_bounds__(THREADS) gather(float* x, const Tile* tiles, const Found* found, const State* states,
                                                  unsigned* indices, float* values, int n_tiles, int clear) {
  const int t = static_cast<int>(blockIdx.x) * WARPS + static_cast<int>(warp());
  if (t >= n_tiles) return;
  const State state = states[tiles[t].group];
  if (state.missed == 0) return;
  gather_tile(Largest{x, state.kth}, tiles[t], found[t], clear != 0 ? x : nullptr, x, indices, values);
}

__device__ inline Drawn drawn(const Group& group, const unsigned* round_keys, int g) {
  unsigned bits = 8;
  while (bits < 64 && (static_cast<unsigned long long>(group.size - 1) >> bits) != 0) ++bits;
  const auto size = static_cast<unsigned long long>(group.size);
  return Drawn{round_keys + g * ROUNDS, (bits + 1) / 2, size, group.count};
}

// One block for each tile; `round_keys`: those of each group.
__global__ void __launch_bounds__(THREADS) draw(const Tile* tiles, const Group* groups, const unsigned* round_keys,
                                                Found* found) {
  const Tile tile = tiles[blockIdx.x];
  tally_tile(drawn(groups[tile.group], round_keys, tile.group), tile, found[blockIdx.x]);
}

__global__ void __launch_bounds__(THREADS) settle_drawn(const Group* groups, Found* found) {
  share(groups[blockIdx.x], found);
}

__global__ void __launch_bounds__(THREADS) gather_drawn(const Tile* tiles, const Group* groups,
                                                        const unsigned* round_keys, const Found* found,
                                                        unsigned* indices, int n_tiles) {
  const int t = static_cast<int>(blockIdx.x) * WARPS + static_cast<int>(warp());
  if (t >= n_tiles) return;
  const Tile tile = tiles[t];
  gather_tile(drawn(groups[tile.group], round_keys, tile.group), tile, found[t], nullptr, nullptr, indices, nullptr);
}
