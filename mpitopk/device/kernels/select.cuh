// Exact selection of the largest magnitudes, in the order that select.cu describes.
#pragma once

#include "common.cuh"

constexpr int VECTORS = 4;                    // of four entries, of each thread
constexpr int TILE = THREADS * VECTORS * 4;   // entries of the largest tile
constexpr unsigned BINS = 4096;
constexpr unsigned BIN_BITS = 12;
constexpr unsigned LIST = 1024;

// What has been found in a tile. After `settle`: where its winners go, and how many of its ties win.
struct Found {
  unsigned begin;  // of its candidates
  unsigned count;
  unsigned above;
  unsigned ties;
  unsigned offset;
};

// The selection from a group. All but `floor` is set anew by `window`.
struct State {
  unsigned low;         // candidates have at least this magnitude
  unsigned sure;        // those of at least this one win, or the window is missed
  unsigned shift;       // of a candidate's magnitude above `low`: its bin
  unsigned candidates;
  unsigned certain;     // candidates from `sure` on
  unsigned overflow;    // 1: there was no room for all candidates
  unsigned missed;      // 1: the window did not hold the k-th
  unsigned kth;         // the k-th magnitude
  unsigned wanted;      // in full.cu: the rank of the k-th among those that are still in question
  unsigned floor;       // below this the next k-th will hardly be
};

// What the blocks of `refine` gather of a group.
struct Gathered {
  unsigned tiles;   // that are done
  unsigned listed;  // candidates in the bin of the k-th
  unsigned least;   // magnitude among them
  unsigned most;
};

struct Status {
  unsigned cursor;     // candidates that have found room
  unsigned nonfinite;  // 1: an entry is too large, or NaN
  unsigned missed;     // groups
};

struct Listed {
  unsigned key;
  int tile;
};

// Python allocates these.
static_assert(sizeof(Tile) == 24 && sizeof(Group) == 24 && sizeof(Found) == 20 && sizeof(State) == 40);
static_assert(sizeof(Gathered) == 16 && sizeof(Status) == 12 && sizeof(Listed) == 8 && TILE == 4096);

struct Bin {
  unsigned index;
  unsigned above;  // entries in higher bins
};

// The bin in which the k-th largest is, by all threads of the block; index BINS if there are fewer than k.
__device__ inline Bin find_bin(const unsigned* bins, unsigned k) {
  __shared__ Bin found;
  const unsigned per_thread = BINS / blockDim.x;
  const unsigned last = BINS - threadIdx.x * per_thread;  // the first threads take the highest bins
  unsigned mine = 0;
  for (unsigned i = 1; i <= per_thread; ++i) mine += bins[last - i];
  unsigned total;
  unsigned above = block_prefix(mine, total);
  if (threadIdx.x == 0) found = {BINS, total};
  __syncthreads();
  if (above < k && above + mine >= k) {
    unsigned bin = last;
    for (unsigned here = 0;; above += here) {
      here = bins[--bin];
      if (above + here >= k) break;
    }
    found = {bin, above};
  }
  __syncthreads();
  const Bin result = found;
  __syncthreads();
  return result;
}

// Share the places of a group among its tiles, by all threads of the block: those above the k-th first,
// then as many of the ties as there are places left, in the order of their indices.
__device__ inline void share(const Group& group, Found* found) {
  unsigned total;
  unsigned sum = 0;
  for (int t = group.first_tile + static_cast<int>(threadIdx.x); t < group.last_tile; t += blockDim.x) {
    sum += found[t].above;
  }
  block_prefix(sum, total);
  const unsigned wanted = group.count - total;
  unsigned offset = group.offset;
  unsigned before = 0;
  for (int first = group.first_tile; first < group.last_tile; first += blockDim.x) {
    const int t = first + static_cast<int>(threadIdx.x);
    const bool mine = t < group.last_tile;
    const unsigned ties = mine ? found[t].ties : 0;
    unsigned all_ties;
    const unsigned ties_before = before + block_prefix(ties, all_ties);
    const unsigned places = min(wanted, ties_before);
    const unsigned winning = min(wanted, ties_before + ties) - places;
    unsigned all_above;
    const unsigned above_before = block_prefix(mine ? found[t].above : 0, all_above);
    if (mine) {
      found[t].offset = offset + above_before + places;
      found[t].ties = winning;
    }
    offset += all_above;
    before += all_ties;
  }
}

// Half an octave below.
__device__ inline unsigned floor_below(unsigned kth) { return kth > 1u << 22 ? kth - (1u << 22) : 0; }
