// Bins of consecutive entries, a warp or a thread for each: which entries are chosen, the code in which those
// travel, and the sum of the codes of all ranks, in rank order and without float atomics.
//
//   select_bins   accumulate, mark what is chosen of each bin, and how much that is
//   bin_means     the scale of each segment
//   tally_bins, settle_bins
//                 where the entries of each THREADS bins begin, in one code or in those of all ranks
//   pack_bins     entries to their places; what they stand for is subtracted
//   check_bins    are the entries of every code ascending and in range
//   merge_bins, divide_held
//                 the sum over the divisor, zeros where no code holds anything
//
// For n entries select_bins reads 16 n (half of it from cache) and writes 4 n; merge_bins writes 4 n.
#include "common.cuh"

// Bins of `size` entries; `rows`: (start, stop, first bin) of each segment.
struct Binning {
  const long long* rows;
  int segments;
  int size;
  long long total;
};

struct Span {
  long long start;
  int size;
  int segment;
};

__device__ inline Span bin_of(const Binning& bins, long long b) {
  int first = 0;
  int last = bins.segments - 1;
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (bins.rows[3 * middle + 2] <= b) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  const long long* row = bins.rows + 3 * first;
  const long long start = row[0] + (b - row[2]) * bins.size;
  return {start, static_cast<int>(min(static_cast<long long>(bins.size), row[1] - start)), first};
}

// Numbers of one or two bytes.
__device__ inline unsigned narrow_at(const unsigned char* x, long long i, int bytes) {
  return bytes == 1 ? x[i] : reinterpret_cast<const unsigned short*>(x)[i];
}
__device__ inline void put_narrow(unsigned char* x, long long i, int bytes, unsigned value) {
  if (bytes == 1) {
    x[i] = static_cast<unsigned char>(value);
  } else {
    reinterpret_cast<unsigned short*>(x)[i] = static_cast<unsigned short>(value);
  }
}

// One warp for each bin. `marks`: a bit for each entry of a bin, in whole words.
template <class G>
__global__ void __launch_bounds__(THREADS) select_bins(const G* gradient, const float* residual, float* out,
                                                       const long long* rows, int segments, int size, long long total,
                                                       float factor, unsigned* marks, unsigned char* counts,
                                                       int count_bytes, float* most, unsigned* flag) {
  const long long b = blockIdx.x * static_cast<long long>(WARPS) + warp();
  if (b >= total) return;
  const Span bin = bin_of({rows, segments, size, total}, b);
  unsigned top = 0;
  for (int i = static_cast<int>(lane()); i < bin.size; i += 32) {
    const float sum = __fadd_rn(residual[bin.start + i], widen(gradient[bin.start + i]));
    out[bin.start + i] = sum;
    top = max(top, key_of(sum));
  }
  for (int by = 16; by > 0; by /= 2) top = max(top, __shfl_xor_sync(ALL, top, by));
  unsigned count = 0;
  const int words = (size + 31) / 32;
  for (int word = 0; word < words; ++word) {
    const int i = 32 * word + static_cast<int>(lane());
    bool chosen = false;
    if (i < bin.size) {
      const long long at = bin.start + i;
      const float ahead = __fadd_rn(residual[at], __fmul_rn(factor, widen(gradient[at])));
      chosen = key_of(ahead) >= top && key_of(out[at]) != 0;
    }
    const unsigned bits = __ballot_sync(ALL, chosen);
    if (lane() == 0) marks[b * words + word] = bits;
    count += static_cast<unsigned>(__popc(bits));
  }
  if (lane() != 0) return;
  put_narrow(counts, b, count_bytes, count);
  most[b] = __uint_as_float(top);
  if (top >= TOO_LARGE) atomicOr(flag, 1u);
}

// One block for each segment: the mean from THREADS sums of every THREADS-th, added up by halves.
__global__ void __launch_bounds__(THREADS) bin_means(const float* most, const long long* rows, int size,
                                                     float* scales) {
  __shared__ double sums[THREADS];
  const long long* row = rows + 3 * blockIdx.x;
  const long long bins = (row[1] - row[0] + size - 1) / size;
  double sum = 0;
  for (long long i = threadIdx.x; i < bins; i += THREADS) sum += most[row[2] + i];
  sums[threadIdx.x] = sum;
  for (unsigned half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) scales[blockIdx.x] = static_cast<float>(sums[0] / static_cast<double>(bins));
}

// One block for each THREADS bins of each code; `starts`: the bytes where the counts of each code begin.
__global__ void __launch_bounds__(THREADS) tally_bins(const unsigned char* buffer, const long long* starts, int tiles,
                                                      long long total, int count_bytes, unsigned* tallies) {
  const int rank = static_cast<int>(blockIdx.x) / tiles;
  const long long b = (blockIdx.x % tiles) * static_cast<long long>(THREADS) + threadIdx.x;
  const unsigned count = b < total ? narrow_at(buffer + starts[rank], b, count_bytes) : 0;
  unsigned all;
  block_prefix(count, all);
  if (threadIdx.x == 0) tallies[blockIdx.x] = all;
}

// One block for each code: tallies become offsets, and `totals` their sum.
__global__ void __launch_bounds__(THREADS) settle_bins(unsigned* tallies, int tiles, unsigned long long* totals) {
  unsigned* mine = tallies + blockIdx.x * static_cast<long long>(tiles);
  unsigned long long before = 0;
  for (int first = 0; first < tiles; first += THREADS) {
    const int i = first + static_cast<int>(threadIdx.x);
    const unsigned here = i < tiles ? mine[i] : 0;
    unsigned all;
    const unsigned offset = static_cast<unsigned>(before) + block_prefix(here, all);
    if (i < tiles) mine[i] = offset;
    before += all;
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = before;
}

// One block for each THREADS bins.
__global__ void __launch_bounds__(THREADS) pack_bins(float* x, const long long* rows, int segments, int size,
                                                     long long total, const unsigned* marks,
                                                     const unsigned char* counts, int count_bytes,
                                                     const unsigned* offsets, const float* scales,
                                                     unsigned char* entries, int entry_bytes) {
  const long long b = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
  const unsigned count = b < total ? narrow_at(counts, b, count_bytes) : 0;
  unsigned all;
  long long to = offsets[blockIdx.x] + static_cast<long long>(block_prefix(count, all));
  if (count == 0) return;
  const Span bin = bin_of({rows, segments, size, total}, b);
  const float scale = scales[bin.segment];
  const int words = (size + 31) / 32;
  for (int word = 0; word < words; ++word) {
    for (unsigned rest = marks[b * words + word]; rest != 0; rest &= rest - 1) {
      const unsigned place = 32u * word + static_cast<unsigned>(__ffs(static_cast<int>(rest)) - 1);
      const float value = x[bin.start + place];
      const unsigned negative = value < 0.0f ? 1u : 0u;
      put_narrow(entries, to++, entry_bytes, place | negative << (8 * entry_bytes - 1));
      x[bin.start + place] = __fsub_rn(value, negative != 0 ? -scale : scale);
    }
  }
}

// Where the codes of all ranks are: each begins at `starts` with its scales; `words`: how many it has.
struct Codes {
  const unsigned char* buffer;
  const long long* starts;
  const long long* words;
  int ranks;
  int tiles;
  long long total;
  int count_bytes;
  int entry_bytes;
  int before_counts;    // bytes
  long long before_entries;  // bytes
  const unsigned* offsets;

  // Of a bin: how many entries, and where they are; by all threads of the block, a bin each.
  __device__ unsigned find(int rank, int tile, long long b, const unsigned char*& entries, long long& first) const {
    const unsigned char* code = buffer + starts[rank];
    const unsigned count = b < total ? narrow_at(code + before_counts, b, count_bytes) : 0;
    unsigned all;
    first = offsets[rank * static_cast<long long>(tiles) + tile] + static_cast<long long>(block_prefix(count, all));
    entries = code + before_entries;
    return count;
  }
};

// One block for each THREADS bins of each code. `wrong` receives `ranks` less the lowest rank whose code is wrong;
// 0 stays if there is none.
__global__ void __launch_bounds__(THREADS) check_bins(const unsigned char* buffer, const long long* starts,
                                                      const long long* words, int ranks, int tiles,
                                                      const long long* rows, int segments, int size, long long total,
                                                      int count_bytes, int entry_bytes, int before_counts,
                                                      long long before_entries, const unsigned* offsets,
                                                      const unsigned long long* totals, unsigned* wrong) {
  const int rank = static_cast<int>(blockIdx.x) / tiles;
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const long long b = tile * static_cast<long long>(THREADS) + threadIdx.x;
  const Codes codes{buffer,      starts,        words,          ranks,  tiles, total, count_bytes,
                    entry_bytes, before_counts, before_entries, offsets};
  const unsigned long long bytes = before_entries + totals[rank] * entry_bytes;
  bool bad = (bytes + 3) / 4 != static_cast<unsigned long long>(words[rank]);
  if (!bad) {  // the same in all threads
    const unsigned char* entries;
    long long at;
    const unsigned count = codes.find(rank, tile, b, entries, at);
    if (b < total) {
      const unsigned length = static_cast<unsigned>(bin_of({rows, segments, size, total}, b).size);
      unsigned least = 0;
      bad = count > length;
      for (unsigned i = 0; i < count && !bad; ++i) {
        const unsigned place = narrow_at(entries, at + i, entry_bytes) & ((1u << (8 * entry_bytes - 1)) - 1);
        bad = place < least || place >= length;
        least = place + 1;
      }
    }
  }
  if (bad) atomicMax(wrong, static_cast<unsigned>(ranks - rank));
}

// One block for each THREADS bins. Nothing is written if a code is wrong. `held` receives a bit for each entry: does
// some code hold it?
__global__ void __launch_bounds__(THREADS) merge_bins(const unsigned char* buffer, const long long* starts,
                                                      const long long* words, int ranks, int tiles,
                                                      const long long* rows, int segments, int size, long long total,
                                                      int count_bytes, int entry_bytes, int before_counts,
                                                      long long before_entries, const unsigned* offsets, float* out,
                                                      unsigned* held, const unsigned* wrong) {
  if (*wrong != 0) return;
  const int tile = static_cast<int>(blockIdx.x);
  const long long begin = tile * static_cast<long long>(THREADS);
  const long long end = min(total, begin + THREADS);
  const Binning bins{rows, segments, size, total};
  const Codes codes{buffer,      starts,        words,          ranks,  tiles, total, count_bytes,
                    entry_bytes, before_counts, before_entries, offsets};
  const int mark_words = (size + 31) / 32;
  const Span last = bin_of(bins, end - 1);
  for (long long i = bin_of(bins, begin).start + threadIdx.x; i < last.start + last.size; i += THREADS) out[i] = 0.0f;
  for (long long i = begin * mark_words + threadIdx.x; i < end * mark_words; i += THREADS) held[i] = 0;
  __syncthreads();
  const long long b = begin + threadIdx.x;
  const Span bin = bin_of(bins, min(b, total - 1));
  unsigned* marks = held + b * mark_words;
  const unsigned sign = 1u << (8 * entry_bytes - 1);
  for (int rank = 0; rank < ranks; ++rank) {
    const unsigned char* entries;
    long long at;
    const unsigned count = codes.find(rank, tile, b, entries, at);
    if (count == 0) continue;  // find is for all threads, the rest is not
    const float scale = reinterpret_cast<const float*>(buffer + starts[rank])[bin.segment];
    for (unsigned i = 0; i < count; ++i) {
      const unsigned entry = narrow_at(entries, at + i, entry_bytes);
      const unsigned place = entry & (sign - 1);
      float* to = out + bin.start + place;
      *to = __fadd_rn(*to, (entry & sign) != 0 ? -scale : scale);
      marks[place / 32] |= 1u << (place % 32);
    }
  }
}

// Divide what some code holds. `total_held` receives how many entries those are.
__global__ void __launch_bounds__(THREADS) divide_held(const long long* rows, int segments, int size, long long total,
                                                       const unsigned* held, float divisor, float* out,
                                                       const unsigned* wrong, unsigned long long* total_held) {
  if (*wrong != 0) return;
  const int mark_words = (size + 31) / 32;
  const long long word = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
  unsigned mine = 0;
  if (word < total * mark_words && held[word] != 0) {
    const Span bin = bin_of({rows, segments, size, total}, word / mark_words);
    float* to = out + bin.start + 32 * (word % mark_words);
    for (unsigned rest = held[word]; rest != 0; rest &= rest - 1) {
      const int place = __ffs(static_cast<int>(rest)) - 1;
      to[place] = __fdiv_rn(to[place], divisor);
      ++mine;
    }
  }
  unsigned all;
  block_prefix(mine, all);
  if (threadIdx.x == 0 && all > 0) atomicAdd(total_held, static_cast<unsigned long long>(all));
}
