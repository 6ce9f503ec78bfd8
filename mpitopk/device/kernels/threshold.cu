// All entries from some magnitude on, and samples from which such a magnitude is estimated.
//
//   aim     every group's window is that magnitude and all above it
//   scan    (select.cu) one pass that writes what is found aside
//   place   whether it is to be moved, and where that of each tile goes
//   emit    (select.cu) to its place, ascending by index
//
// For n entries of 4 bytes of which c are found: scan reads 4 n and writes 8 c; if they are moved, emit
// reads 8 c and writes 12 c.
#include "select.cuh"

__global__ void __launch_bounds__(THREADS) aim(State* states, Status* status, int n_groups, unsigned low) {
  const int g = static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x);
  if (g == 0) *status = Status{0, 0, 0};
  if (g < n_groups) states[g] = State{low, low, 0, 0, 0, 0, 0, 0, 0, states[g].floor};
}

// One block. Afterwards all that was found wins, or nothing does. `kth` 0 lets no zero be greater: zeros tie.
__global__ void __launch_bounds__(1024) place(Found* found, State* states, const Status* status, int n_tiles,
                                              int n_groups, unsigned least, unsigned most) {
  const bool moved = status->nonfinite == 0 && status->cursor >= least && status->cursor <= most;
  for (int g = static_cast<int>(threadIdx.x); g < n_groups; g += blockDim.x) {
    State* state = states + g;
    state->sure = NONE;
    state->kth = state->low > 0 ? state->low - 1 : 0;
    state->missed = moved ? 0 : 1;
  }
  if (!moved) return;
  unsigned offset = 0;
  for (int first = 0; first < n_tiles; first += blockDim.x) {
    const int t = first + static_cast<int>(threadIdx.x);
    const unsigned count = t < n_tiles ? found[t].count : 0;
    unsigned all;
    const unsigned before = block_prefix(count, all);
    if (t < n_tiles) {
      found[t].offset = offset + before;
      found[t].ties = count;
    }
    offset += all;
  }
}

// The last of the tiles first <= t < last that begins at or before an entry of their group.
__device__ inline int tile_of(const Tile* tiles, int first, int last, long long position) {
  while (last - first > 1) {
    const int middle = (first + last) / 2;
    if (tiles[middle].before <= position) {
      first = middle;
    } else {
      last = middle;
    }
  }
  return first;
}

// One warp for each chunk; `total`: chunks of all groups. The first of equal magnitudes wins.
__global__ void __launch_bounds__(THREADS) chunk_maxima(const float* x, const Tile* tiles, const Group* groups,
                                                        int n_groups, unsigned total, long long chunk,
                                                        unsigned* indices) {
  const unsigned c = blockIdx.x * static_cast<unsigned>(WARPS) + warp();
  if (c >= total) return;
  int g = 0;  // the last group that begins at or before this chunk
  for (int last = n_groups; last - g > 1;) {
    const int middle = (g + last) / 2;
    if (groups[middle].offset <= c) {
      g = middle;
    } else {
      last = middle;
    }
  }
  const Group group = groups[g];
  const long long begin = (c - group.offset) * chunk;
  const long long stop = min(group.size, begin + chunk);
  int t = tile_of(tiles, group.first_tile, group.last_tile, begin);
  unsigned most = 0;
  unsigned best = ALL;
  for (long long position = begin + lane(); position < stop; position += 32) {
    while (position >= tiles[t].before + tiles[t].size) ++t;
    const long long i = tiles[t].start + (position - tiles[t].before);
    const unsigned key = key_of(x[i]);
    if (best == ALL || key > most) {
      most = key;
      best = static_cast<unsigned>(i);
    }
  }
  for (int by = 16; by > 0; by /= 2) {
    const unsigned other = __shfl_xor_sync(ALL, most, by);
    const unsigned where = __shfl_xor_sync(ALL, best, by);
    if (other > most || (other == most && where < best)) {
      most = other;
      best = where;
    }
  }
  if (lane() == 0) indices[c] = best;
}

__device__ inline unsigned long long splitmix64(unsigned long long z) {
  z += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Copy one entry out of each of `count` equal parts of the only group, of `size` entries.
__global__ void __launch_bounds__(THREADS) sample_group(const float* x, const Tile* tiles, int n_tiles,
                                                        unsigned long long size, unsigned long long count,
                                                        unsigned long long key, float* out) {
  const unsigned long long i = blockIdx.x * static_cast<unsigned long long>(THREADS) + threadIdx.x;
  if (i >= count) return;
  const unsigned long long inside = ((i * size % count) << 31) + (splitmix64(key + i) >> 33) * size;
  const auto position = static_cast<long long>(i * size / count + inside / (count << 31));
  const Tile tile = tiles[tile_of(tiles, 0, n_tiles, position)];
  out[i] = x[tile.start + (position - tile.before)];
}
