// The Python side: check dtypes and lengths, release the GIL, pick the instantiation.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "baselines.hpp"
#include "bin_code.hpp"
#include "bins.hpp"
#include "combine.hpp"
#include "elias.hpp"
#include "lines.hpp"
#include "merge.hpp"
#include "quantize.hpp"
#include "random.hpp"
#include "select.hpp"
#include "threshold.hpp"

namespace py = pybind11;

namespace {

using namespace mpitopk;

using Numbers = std::vector<std::int64_t>;

template <class T>
constexpr char code = 0;
template <>
constexpr char code<float> = 'f';
template <>
constexpr char code<double> = 'd';
template <>
constexpr char code<Half> = 'e';
template <>
constexpr char code<Bfloat> = 'H';

template <class T>
struct View {
  T* data;
  size_t size;
};

[[noreturn]] void wrong_type(const char* name, const py::array& x) {
  throw py::type_error(std::string(name) + ": dtype " + std::string(py::str(x.dtype())) + " will not do");
}

void require(bool right, const char* problem) {
  if (!right) throw py::value_error(problem);
}

template <class T>
View<T> view_of(const char* name, const py::array& x) {
  require(x.ndim() == 1 && (x.flags() & py::array::c_style) != 0, "arrays must be flat and contiguous");
  if constexpr (std::is_const_v<T>) {
    return {static_cast<T*>(x.data()), static_cast<size_t>(x.size())};
  } else {
    if (!x.writeable()) throw py::value_error(std::string(name) + " is read-only");
    return {static_cast<T*>(const_cast<void*>(x.data())), static_cast<size_t>(x.size())};
  }
}

template <class T>
bool is(const py::array& x) {
  const py::dtype type = x.dtype();
  return type.char_() == code<std::remove_const_t<T>> && type.byteorder() != '>';
}

// The array as T's, or a TypeError.
template <class T>
View<T> as(const char* name, const py::array& x) {
  using Plain = std::remove_const_t<T>;
  bool right = false;
  if constexpr (code<Plain> != 0) {
    right = is<T>(x);
  } else {
    right = x.dtype().is(py::dtype::of<Plain>()) ||
            (x.dtype().kind() == py::dtype::of<Plain>().kind() && x.itemsize() == sizeof(Plain));
  }
  if (!right) wrong_type(name, x);
  return view_of<T>(name, x);
}

// Call f with the array as one of the types.
template <class... Types, class F>
auto visit(const char* name, const py::array& x, F&& f) {
  using Result = std::common_type_t<decltype(f(std::declval<View<Types>>()))...>;
  std::optional<Result> result;
  const bool known = ((is<Types>(x) && (result = f(view_of<Types>(name, x)), true)) || ...);
  if (!known) wrong_type(name, x);
  return *result;
}

struct Plan {
  View<const std::int64_t> pieces, counts;

  Plan(const py::array& rows, const py::array& wanted)
      : pieces{static_cast<const std::int64_t*>(rows.data()), static_cast<size_t>(rows.size()) / 3},
        counts(as<const std::int64_t>("counts", wanted)) {
    const bool right = rows.ndim() == 2 && rows.shape(1) == 3 && rows.itemsize() == 8 &&
                       (rows.flags() & py::array::c_style) != 0;
    require(right, "pieces must be contiguous rows of (start, stop, group), int64");
  }
};

std::vector<Dense> dense_of(const py::array& rows, size_t size) {
  const bool right = rows.ndim() == 2 && rows.shape(1) == 2 && rows.itemsize() == 8 &&
                     (rows.flags() & py::array::c_style) != 0;
  require(right, "dense must be contiguous rows of (start, stop), int64");
  const auto* first = static_cast<const Dense*>(rows.data());
  std::vector<Dense> dense(first, first + rows.shape(0));
  for (const Dense& piece : dense) {
    const bool inside = piece.start >= 0 && piece.start <= piece.stop;
    require(inside && static_cast<size_t>(piece.stop) <= size, "dense pieces must lie in the buffer");
  }
  return dense;
}

Bins bins_of(const py::array& rows, size_t size, size_t entries) {
  const bool right = rows.ndim() == 2 && rows.shape(1) == 3 && rows.itemsize() == 8 &&
                     (rows.flags() & py::array::c_style) != 0;
  require(right, "bins must be contiguous rows of (start, stop, first), int64");
  const Bins bins(static_cast<const Binned*>(rows.data()), static_cast<size_t>(rows.shape(0)), size);
  require(size > 0 && size <= size_t{1} << 15 && bins.sound() && bins.entries() == entries,
          "bins must cover the buffer");
  return bins;
}

Lines lines_of(const py::array& vectors, const py::array& representatives, int hinge_bits, size_t entries) {
  const auto flat = [](const py::array& x) {
    return x.ndim() == 2 && is<float>(x) && (x.flags() & py::array::c_style) != 0;
  };
  require(flat(vectors) && flat(representatives), "vectors and representatives must be contiguous rows of float32");
  const auto number = static_cast<size_t>(vectors.shape(0));
  const auto block = static_cast<size_t>(vectors.shape(1));
  const auto branches = static_cast<size_t>(representatives.shape(0));
  require(block > 0 && block <= longest && static_cast<size_t>(representatives.shape(1)) == block &&
              std::has_single_bit(number) && number <= size_t{1} << 16 && std::has_single_bit(branches) &&
              branches <= std::min(number, Lines::most_branches),
          "vectors and representatives must be powers of two");
  require(hinge_bits == 8 || hinge_bits == 16, "hinge_bits: 8 or 16");
  return {static_cast<const float*>(vectors.data()), static_cast<const float*>(representatives.data()), entries, block,
          branches, number / branches, std::countr_zero(number), hinge_bits};
}

// Call f with the types in which counts and entries of such bins travel.
template <class F>
auto with_bin_types(const Bins& bins, F&& f) {
  if (bins.size() <= 128) return f(std::uint8_t{}, std::uint8_t{});
  if (bins.size() < 256) return f(std::uint8_t{}, std::uint16_t{});
  return f(std::uint16_t{}, std::uint16_t{});
}

// The pieces that belong to a group.
std::vector<Dense> sparse_of(const py::array& rows, size_t size) {
  const Plan plan(rows, py::array_t<std::int64_t>(0));
  std::vector<Dense> parts;
  std::int64_t at = 0;
  for (size_t i = 0; i < plan.pieces.size; ++i) {
    const std::int64_t* row = plan.pieces.data + 3 * i;
    require(row[0] == at && row[1] >= at && static_cast<size_t>(row[1]) <= size, "pieces must cover the buffer");
    at = row[1];
    if (row[2] >= 0) parts.push_back({row[0], row[1]});
  }
  return parts;
}

size_t total_of(const std::vector<Dense>& dense) {
  size_t total = 0;
  for (const Dense& piece : dense) total += static_cast<size_t>(piece.stop - piece.start);
  return total;
}

class Engine {
 public:
  Engine(int threads, const std::string& isa)
      : pool_(threads > 0 ? threads : throw py::value_error("threads: at least one")),
        isa_(parse(isa)),
        floats_(pool_, isa_),
        doubles_(pool_, isa_) {}

  int threads() const { return pool_.threads(); }
  std::string isa() const { return isa_ == Isa::avx2 ? "avx2" : "scalar"; }
  size_t fallbacks() const { return floats_.fallbacks() + doubles_.fallbacks(); }
  size_t candidates() const { return candidates_; }

  bool finite(const py::array& x) {
    return visit<const float, const double, const Half, const Bfloat>("x", x, [&](auto v) {
      const py::gil_scoped_release unlocked;
      return all_parts(pool_, v.size, [&](size_t i, size_t n) { return run_on<CheckFinite>(isa_, v.data + i, n); });
    });
  }

  size_t zero_nonfinite(const py::array& x) {
    return visit<float, double, Half, Bfloat>("x", x, [&](auto v) {
      const py::gil_scoped_release unlocked;
      std::atomic<size_t> bad{0};
      for_parts(pool_, v.size, [&](size_t i, size_t n) { bad += run_on<ZeroNonfinite>(isa_, v.data + i, n); });
      return bad.load();
    });
  }

  bool accumulate(const py::array& gradient, const std::optional<py::array>& residual, const py::array& out,
                  double scale, double keep) {
    return with_gradient(gradient, out, [&](auto g, auto o) {
      using T = std::remove_pointer_t<decltype(o.data)>;
      const T* r = nullptr;
      if (residual) {
        const auto view = as<const T>("residual", *residual);
        require(view.size == o.size, "residual and out must be of one length");
        r = view.data;
      }
      const py::gil_scoped_release unlocked;
      return all_parts(pool_, o.size, [&](size_t i, size_t n) {
        const T* from = r == nullptr ? nullptr : r + i;
        return run_on<Accumulate>(isa_, g.data + i, from, o.data + i, n, static_cast<T>(scale), static_cast<T>(keep));
      });
    });
  }

  double norm(const py::array& x) {
    return visit<const float, const double, const Half, const Bfloat>("x", x, [&](auto v) {
      const py::gil_scoped_release unlocked;
      sums_.resize(stretches(v.size));
      auto sum = [&](size_t i, size_t n) {
        run_on<Sum>(isa_, v.data + i, n, sums_.data() + i / Sum::stretch, true);
      };
      for_parts(pool_, v.size, sum, Sum::stretch);
      return root_of_sums();
    });
  }

  // The norm of `out`, or -1 where not all is sound. Each stretch is added up while it is in the cache.
  double accumulate_norm(const py::array& gradient, const py::array& residual, const py::array& out) {
    double norm = 0;
    const bool sound = with_gradient(gradient, out, [&](auto g, auto o) {
      using T = std::remove_pointer_t<decltype(o.data)>;
      const auto r = as<const T>("residual", residual);
      require(r.size == o.size, "residual and out must be of one length");
      const py::gil_scoped_release unlocked;
      sums_.resize(stretches(o.size));
      const bool all = all_parts(pool_, o.size, [&](size_t begin, size_t size) {
        bool right = true;
        for (size_t i = begin; i < begin + size; i += Sum::stretch) {
          const size_t n = std::min(Sum::stretch, begin + size - i);
          right &= run_on<Accumulate>(isa_, g.data + i, r.data + i, o.data + i, n, T{1}, T{1});
          run_on<Sum>(isa_, static_cast<const T*>(o.data + i), n, sums_.data() + i / Sum::stretch, true);
        }
        return right;
      }, Sum::stretch);
      norm = root_of_sums();
      return all;
    });
    return sound ? norm : -1;
  }

  bool accumulate_select(const py::array& gradient, const py::array& residual, const py::array& out,
                         const py::array& pieces, const py::array& counts, const py::array& indices,
                         const py::array& values) {
    return with_gradient(gradient, out, [&](auto g, auto o) {
      using T = std::remove_pointer_t<decltype(o.data)>;
      using G = std::remove_const_t<std::remove_pointer_t<decltype(g.data)>>;
      const auto r = as<const T>("residual", residual);
      require(r.size == o.size && r.data != o.data, "residual and out must be two buffers of one length");
      const bool streams = o.size * sizeof(T) > streaming_bytes;
      return select_from<T>(Fused<T, G>{g.data, r.data, o.data, streams}, o.size, o.data, pieces, counts, indices,
                            values);
    });
  }

  bool select(const py::array& x, const py::array& pieces, const py::array& counts, const py::array& indices,
              const py::array& values) {
    return visit<const float, const double>("x", x, [&](auto v) {
      using T = std::remove_const_t<std::remove_pointer_t<decltype(v.data)>>;
      return select_from<T>(mpitopk::Plain<T>{v.data}, v.size, static_cast<T*>(nullptr), pieces, counts, indices,
                            values);
    });
  }

  void random_indices(const py::array& pieces, const py::array& counts, std::uint64_t key, const py::array& out) {
    const Plan plan(pieces, counts);
    const size_t rows = plan.pieces.size;
    const size_t size = rows == 0 ? 0 : static_cast<size_t>(plan.pieces.data[3 * rows - 2]);
    const auto to = as<Index>("out", out);
    cut_.update(size, plan.pieces.data, rows, plan.counts.data, plan.counts.size, pool_);
    require(to.size == cut_.total, "out must have room for the sum of counts");
    const py::gil_scoped_release unlocked;
    random_.run(pool_, isa_, cut_, key, to.data);
  }

  size_t move_above(const py::array& x, const py::array& pieces, double threshold, size_t least,
                    const py::array& indices, const py::array& values) {
    return with_room(x, pieces, indices, values, [&](auto v, const auto& parts, auto where, auto what) {
      using T = std::remove_pointer_t<decltype(v.data)>;
      const Bits<T> low = key_of(static_cast<T>(threshold));
      return above<T>().move(pool_, isa_, v.data, v.size, parts, low, least, where.size, where.data, what.data);
    });
  }

  size_t search_above(const py::array& x, const py::array& pieces, double threshold, size_t least, int rounds,
                      const py::array& indices, const py::array& values) {
    return with_room(x, pieces, indices, values, [&](auto v, const auto& parts, auto where, auto what) {
      using T = std::remove_pointer_t<decltype(v.data)>;
      return above<T>().search(pool_, isa_, v.data, v.size, parts, threshold, least, where.size, rounds, where.data,
                               what.data);
    });
  }

  void chunk_maxima(const py::array& x, const py::array& pieces, const py::array& counts, size_t chunk,
                    const py::array& indices) {
    const Plan plan(pieces, counts);
    const auto to = as<Index>("indices", indices);
    require(chunk > 0, "chunk: at least one");
    visit<const float, const double>("x", x, [&](auto v) {
      sparse_of(pieces, v.size);  // or throw
      std::vector<std::vector<Dense>> groups(plan.counts.size);
      for (size_t i = 0; i < plan.pieces.size; ++i) {
        const std::int64_t* row = plan.pieces.data + 3 * i;
        require(row[2] < static_cast<std::int64_t>(groups.size()), "pieces: a group is -1 or a position in counts");
        if (row[2] >= 0) groups[static_cast<size_t>(row[2])].push_back({row[0], row[1]});
      }
      size_t total = 0;
      for (const auto& parts : groups) total += (total_of(parts) + chunk - 1) / chunk;
      require(to.size == total, "indices must have room for one entry of each chunk");
      const py::gil_scoped_release unlocked;
      Index* out = to.data;
      for (const auto& parts : groups) out = mpitopk::chunk_maxima(pool_, v.data, parts, total_of(parts), chunk, out);
      return true;
    });
  }

  void sample(const py::array& x, const py::array& pieces, std::uint64_t key, const py::array& out) {
    visit<const float, const double>("x", x, [&](auto v) {
      using T = std::remove_const_t<std::remove_pointer_t<decltype(v.data)>>;
      const auto to = as<T>("out", out);
      const std::vector<Dense> parts = sparse_of(pieces, v.size);
      require(to.size <= total_of(parts), "out must not be longer than the group");
      const py::gil_scoped_release unlocked;
      mpitopk::sample(pool_, v.data, parts, total_of(parts), key, to.data, to.size);
      return true;
    });
  }

  void take(const py::array& x, const py::array& indices, const py::array& values, bool clear) {
    const auto at = as<const Index>("indices", indices);
    visit<float, double>("values", values, [&](auto to) {
      using T = std::remove_pointer_t<decltype(to.data)>;
      require(at.size == to.size, "indices and values must be of one length");
      return visit<const float, const double, const Half, const Bfloat>("x", x, [&](auto from) {
        using G = std::remove_const_t<std::remove_pointer_t<decltype(from.data)>>;
        G* zeros = clear ? view_of<G>("x", x).data : nullptr;
        const py::gil_scoped_release unlocked;
        return all_parts(pool_, at.size, [&](size_t first, size_t part) {
          for (size_t i = first; i < first + part; ++i) {
            const Index j = at.data[i];
            if (j >= from.size) return false;
            to.data[i] = widen<T>(from.data[j]);
            if (zeros != nullptr) zeros[j] = G{};
          }
          return true;
        });
      });
    }) ? void() : throw py::value_error("indices must lie in the buffer");
  }

  void pack(const py::array& x, const py::array& dense, const py::array& indices, const py::array& values,
            const py::array& out_indices, const py::array& out_values) {
    const auto at = as<const Index>("indices", indices);
    const auto where = as<Index>("out_indices", out_indices);
    visit<float, double>("x", x, [&](auto from) {
      using T = std::remove_pointer_t<decltype(from.data)>;
      const auto what = as<T>("values", values);
      const std::vector<Dense> pieces = dense_of(dense, from.size);
      require(at.size == what.size, "indices and values must be of one length");
      require(where.size == at.size || where.size == 0, "out_indices must be as long as indices, or empty");
      return visit<float, double, Half>("out_values", out_values, [&](auto to) {
        require(to.size == at.size + total_of(pieces), "out_values must have room for all values");
        const py::gil_scoped_release unlocked;
        mpitopk::pack(pool_, isa_, from.data, pieces, at.data, what.data, at.size,
                      where.size == 0 ? nullptr : where.data, to.data);
        return true;
      });
    });
  }

  std::ptrdiff_t merge(const py::array& buffer, const Numbers& starts, const Numbers& counts, int itemsize,
                       const py::array& dense, double divisor, const py::array& out) {
    return visit<float, double>("out", out, [&](auto to) {
      using T = std::remove_pointer_t<decltype(to.data)>;
      return merged<T>(buffer, starts, counts, itemsize, dense, divisor, to.size,
                       [&](const auto& merge) { return merge.to_dense(to.data); });
    });
  }

  std::ptrdiff_t merge_sparse(const py::array& buffer, const Numbers& starts, const Numbers& counts,
                              int itemsize, const py::array& dense, double divisor, size_t size,
                              const py::array& out_indices, const py::array& out_values) {
    const auto where = as<Index>("out_indices", out_indices);
    return visit<float, double>("out_values", out_values, [&](auto to) {
      using T = std::remove_pointer_t<decltype(to.data)>;
      return merged<T>(buffer, starts, counts, itemsize, dense, divisor, size, [&](const auto& merge) {
        require(std::min(where.size, to.size) >= merge.room(), "out_indices and out_values are too short");
        return merge.to_sparse(where.data, to.data);
      });
    });
  }

  std::ptrdiff_t select_bins(const py::array& gradient, const py::array& residual, const py::array& out,
                             const py::array& rows, size_t size, double factor, const py::array& marks,
                             const py::array& counts, const py::array& scales) {
    std::ptrdiff_t entries = 0;
    with_gradient(gradient, out, [&](auto g, auto o) {
      using T = std::remove_pointer_t<decltype(o.data)>;
      const auto r = as<const T>("residual", residual);
      require(r.size == o.size && r.data != o.data, "residual and out must be two buffers of one length");
      const Bins bins = bins_of(rows, size, o.size);
      const auto bits = as<std::uint32_t>("marks", marks);
      const auto to = as<T>("scales", scales);
      require(bits.size == bins.total() * bins.mark_words(), "marks must have bits for all entries");
      require(to.size == bins.segments(), "scales must be as many as rows");
      T* most = most_of<T>().reserve(bins.total());
      return with_bin_types(bins, [&](auto count, auto) {
        const auto of_bins = as<decltype(count)>("counts", counts);
        require(of_bins.size == bins.total(), "counts must be as many as bins");
        const py::gil_scoped_release unlocked;
        entries = mpitopk::select_bins(pool_, isa_, bins, g.data, r.data, o.data, static_cast<T>(factor), bits.data,
                                       of_bins.data, to.data, most);
        return true;
      });
    });
    return entries;
  }

  void pack_bins(const py::array& x, const py::array& rows, size_t size, const py::array& marks,
                 const py::array& counts, const py::array& scales, const py::array& words) {
    const auto to = as<std::uint32_t>("words", words);
    const auto bits = as<const std::uint32_t>("marks", marks);
    visit<float, double>("x", x, [&](auto from) {
      using T = std::remove_pointer_t<decltype(from.data)>;
      const Bins bins = bins_of(rows, size, from.size);
      const auto of_segments = as<const T>("scales", scales);
      require(bits.size == bins.total() * bins.mark_words() && of_segments.size == bins.segments(),
              "marks and scales must be those of the bins");
      return with_bin_types(bins, [&](auto count, auto entry) {
        using Code = BinCode<T, decltype(count), decltype(entry)>;
        const auto of_bins = as<const decltype(count)>("counts", counts);
        require(of_bins.size == bins.total(), "counts must be as many as bins");
        const size_t entries = std::accumulate(of_bins.data, of_bins.data + of_bins.size, size_t{0});
        require(to.size == Code::words_of(bins, entries), "words must have room for all entries, and no more");
        const py::gil_scoped_release unlocked;
        mpitopk::pack_bins<T, decltype(count), decltype(entry)>(pool_, isa_, bins, from.data, bits.data, of_bins.data,
                                                                of_segments.data, to.data, to.size);
        return true;
      });
    });
  }

  std::ptrdiff_t merge_bins(const py::array& buffer, const Numbers& starts, const Numbers& counts,
                            const py::array& rows, size_t size, double divisor, const py::array& out) {
    const auto messages = words_of(buffer, starts, counts);
    return visit<float, double>("out", out, [&](auto to) {
      using T = std::remove_pointer_t<decltype(to.data)>;
      const Bins bins = bins_of(rows, size, to.size);
      return with_bin_types(bins, [&](auto count, auto entry) {
        const py::gil_scoped_release unlocked;
        return mpitopk::merge_bins<T, decltype(count), decltype(entry)>(pool_, isa_, bins, messages,
                                                                        static_cast<T>(divisor), to.data);
      });
    });
  }

  // 1, or 0 where a sum is not finite, or -1 where the indices of theirs cannot be right.
  int combine(const py::array& indices, const py::array& values, const py::array& their_indices,
              const py::array& their_values, const py::array& pieces, const py::array& counts,
              const py::array& out_indices, const py::array& out_values, const py::array& dropped_indices,
              const py::array& dropped_values) {
    const Plan plan(pieces, counts);
    const size_t rows = plan.pieces.size;
    const size_t size = rows == 0 ? 0 : static_cast<size_t>(plan.pieces.data[3 * rows - 2]);
    return visit<float, double>("out_values", out_values, [&](auto to) {
      using T = std::remove_pointer_t<decltype(to.data)>;
      Combine<T>& combine = this->combine_of<T>();
      cut_.update(size, plan.pieces.data, rows, plan.counts.data, plan.counts.size, pool_);
      const size_t k = cut_.total;
      const auto mine = as<const Index>("indices", indices);
      const auto x = as<const T>("values", values);
      const auto theirs = as<const Index>("their_indices", their_indices);
      const auto y = as<const T>("their_values", their_values);
      const auto where = as<Index>("out_indices", out_indices);
      const auto left = as<Index>("dropped_indices", dropped_indices);
      const auto rest = as<T>("dropped_values", dropped_values);
      require(mine.size == k && theirs.size == k && where.size == k && left.size == k && rest.size == k,
              "all lists must be as long as the sum of counts");
      require(to.size >= k && x.size == to.size && y.size == to.size, "all messages must have as many values");
      const py::gil_scoped_release unlocked;
      const Combined sum = combine.run(pool_, cut_, {mine.data, x.data}, {theirs.data, y.data}, {where.data, to.data},
                                 {left.data, rest.data});
      const bool sound = all_parts(pool_, to.size - k, [&](size_t first, size_t part) {
        bool fine = true;
        for (size_t i = k + first; i < k + first + part; ++i) {
          to.data[i] = x.data[i] + y.data[i];
          fine &= key_of(to.data[i]) < Format<T>::too_large;
        }
        return fine;
      });
      return sum == Combined::misplaced ? -1 : sound && sum == Combined::fine ? 1 : 0;
    });
  }

  void put_back(const py::array& x, const py::array& indices, const py::array& values, const py::array& winners,
                bool among) {
    const auto at = as<const Index>("indices", indices);
    const auto won = as<const Index>("winners", winners);
    visit<float, double>("x", x, [&](auto to) {
      using T = std::remove_pointer_t<decltype(to.data)>;
      const auto what = as<const T>("values", values);
      require(at.size == what.size, "indices and values must be of one length");
      const py::gil_scoped_release unlocked;
      return mpitopk::put_back<T>(pool_, to.data, to.size, {at.data, what.data}, at.size, won.data, won.size, among);
    }) ? void() : throw py::value_error("indices must lie in the buffer");
  }

  bool quantize(const py::array& gradient, const py::array& levels, size_t bucket, bool largest, std::uint64_t key,
                const py::array& codes, const py::array& scales) {
    const Levels table = levels_of(levels);
    const auto words = as<std::uint32_t>("codes", codes);
    return with_scales(gradient, scales, bucket, [&](auto g, auto to) {
      require(words.size == words_of(g.size, table.bits), "codes must have bits words for every 32 entries");
      const py::gil_scoped_release unlocked;
      return for_buckets(pool_, g.size, bucket, [&](size_t b, size_t i, size_t n) {
        const bool finite = run_on<Scale>(isa_, g.data + i, n, largest, to + b);
        const auto bits = static_cast<size_t>(table.bits);
        if (finite) run_on<Quantize>(isa_, g.data + i, n, i, to[b], table, key, words.data + i / group * bits);
        return finite;
      });
    });
  }

  void merge_codes(const py::array& buffer, const Numbers& starts, const Numbers& counts,
                   const std::optional<py::array>& levels, int bits, size_t bucket, double divisor,
                   const py::array& out) {
    const auto bytes = as<const std::uint8_t>("buffer", buffer);
    require(bits >= 2 && bits <= most_bits && bucket > 0 && bucket % group == 0, "bits: 2 to 8; bucket: of 32");
    const size_t n_levels = size_t{1} << (bits - 1);
    visit<float, double>("out", out, [&](auto to) {
      using T = std::remove_pointer_t<decltype(to.data)>;
      const size_t scales = (to.size + bucket - 1) / bucket;
      const size_t needed = scales * (sizeof(T) / 4) + (levels ? 0 : n_levels) + words_of(to.size, bits);
      std::vector<Coded<T>> messages;
      for (size_t p = 0; p < starts.size(); ++p) {
        const auto start = static_cast<size_t>(starts[p]);
        const bool inside = starts[p] >= 0 && start + header_bytes + 4 * needed <= bytes.size;
        require(inside && counts[p] >= static_cast<std::int64_t>(needed), "a message lies outside of the buffer");
        const auto* its_scales = reinterpret_cast<const T*>(bytes.data + start + header_bytes);
        const auto* words = reinterpret_cast<const std::uint32_t*>(its_scales + scales);
        const auto* own = reinterpret_cast<const float*>(words);
        if (levels) {
          const auto given = as<const float>("levels", *levels);
          require(given.size == n_levels, "levels: as many as there are codes of magnitude");
          own = given.data;
        } else {
          words += n_levels;
        }
        messages.push_back({its_scales, words, Levels(own, bits)});
      }
      const py::gil_scoped_release unlocked;
      mpitopk::merge_codes(pool_, isa_, messages, bucket, static_cast<T>(divisor), to.data, to.size,
                           to.size * sizeof(T) > streaming_bytes);
      return true;
    });
  }

  // Each bucket is written to room for its longest code, and then moved to its place.
  size_t to_elias(const py::array& codes, int bits, size_t size, size_t bucket, const py::array& out) {
    require(bits >= 2 && bits <= most_bits && bucket > 0 && bucket % group == 0, "bits: 2 to 8; bucket: of 32");
    const auto from = as<const std::uint32_t>("codes", codes);
    const auto to = as<std::uint32_t>("out", out);
    require(from.size == words_of(size, bits), "codes must have bits words for every 32 entries");
    const size_t buckets = (size + bucket - 1) / bucket;
    require(to.size >= 2 * buckets + words_of(size, longest_code), "out is too short");
    const py::gil_scoped_release unlocked;
    std::vector<Extent> extents(buckets);
    std::uint32_t* payload = to.data + 2 * buckets;
    for_buckets(pool_, size, bucket, [&](size_t b, size_t i, size_t n) {
      const size_t at = i / group;
      extents[b] = mpitopk::to_elias(from.data + at * static_cast<size_t>(bits), n, bits, payload + at * longest_code);
      return true;
    });
    size_t end = 0;
    for (size_t b = 0; b < buckets; ++b) {
      const std::uint32_t* first = payload + b * (bucket / group) * longest_code;
      const size_t words = words_for(extents[b].bits);
      std::copy(first, first + words, payload + end);
      end += words;
      to.data[2 * b] = extents[b].bits;
      to.data[2 * b + 1] = extents[b].entries;
    }
    return 2 * buckets + end;
  }

  bool from_elias(const py::array& words, int bits, size_t size, size_t bucket, const py::array& codes) {
    require(bits >= 2 && bits <= most_bits && bucket > 0 && bucket % group == 0, "bits: 2 to 8; bucket: of 32");
    const auto from = as<const std::uint32_t>("words", words);
    const auto to = as<std::uint32_t>("codes", codes);
    require(to.size == words_of(size, bits), "codes must have bits words for every 32 entries");
    const py::gil_scoped_release unlocked;
    const size_t buckets = (size + bucket - 1) / bucket;
    if (from.size < 2 * buckets) return false;
    std::vector<size_t> starts(buckets + 1, 2 * buckets);
    for (size_t b = 0; b < buckets; ++b) starts[b + 1] = starts[b] + words_for(from.data[2 * b]);
    if (starts[buckets] != from.size) return false;
    return for_buckets(pool_, size, bucket, [&](size_t b, size_t i, size_t n) {
      const Extent extent{from.data[2 * b], from.data[2 * b + 1]};
      std::uint32_t* here = to.data + i / group * static_cast<size_t>(bits);
      return mpitopk::from_elias(from.data + starts[b], extent, n, bits, here);
    });
  }

  py::array count_ratios(const py::array& gradient, size_t bucket, bool largest) {
    require(bucket > 0 && bucket % group == 0, "bucket: a multiple of 32");
    std::array<std::atomic<std::int64_t>, ratio_bins> all{};
    visit<const float, const double, const Half, const Bfloat>("gradient", gradient, [&](auto g) {
      using T = Accumulator<std::remove_const_t<std::remove_pointer_t<decltype(g.data)>>>;
      const py::gil_scoped_release unlocked;
      return for_buckets(pool_, g.size, bucket, [&](size_t, size_t i, size_t n) {
        T scale;
        run_on<Scale>(isa_, g.data + i, n, largest, &scale);
        if (scale == 0) return true;
        std::array<std::int64_t, ratio_bins> mine{};
        count_ratios_of(g.data + i, n, scale, mine.data());
        for (size_t b = 0; b < ratio_bins; ++b) {
          if (mine[b] != 0) all[b].fetch_add(mine[b], std::memory_order_relaxed);
        }
        return true;
      });
    });
    py::array_t<std::int64_t> counts(static_cast<py::ssize_t>(ratio_bins));
    std::copy(all.begin(), all.end(), counts.mutable_data());
    return counts;
  }

  bool encode_lines(const py::array& gradient, const py::array& residual, const py::array& out,
                    const py::array& vectors, const py::array& representatives, int hinge_bits,
                    const py::array& words) {
    const auto to = as<std::uint32_t>("words", words);
    return with_gradient(gradient, out, [&](auto g, auto o) {
      using T = std::remove_pointer_t<decltype(o.data)>;
      const auto r = as<const T>("residual", residual);
      require(r.size == o.size && r.data != o.data, "residual and out must be two buffers of one length");
      const Lines lines = lines_of(vectors, representatives, hinge_bits, o.size);
      require(to.size == lines.words<T>(), "words must have room for the code, and no more");
      const py::gil_scoped_release unlocked;
      if (hinge_bits == 8) {
        return mpitopk::encode_lines<T, std::int8_t>(pool_, isa_, lines, g.data, r.data, o.data, to.data);
      }
      return mpitopk::encode_lines<T, std::int16_t>(pool_, isa_, lines, g.data, r.data, o.data, to.data);
    });
  }

  void merge_lines(const py::array& buffer, const Numbers& starts, const Numbers& counts, const py::array& vectors,
                   const py::array& representatives, int hinge_bits, double divisor, const py::array& out) {
    std::vector<const std::uint32_t*> messages;
    const auto codes = words_of(buffer, starts, counts);
    visit<float, double>("out", out, [&](auto to) {
      using T = std::remove_pointer_t<decltype(to.data)>;
      const Lines lines = lines_of(vectors, representatives, hinge_bits, to.size);
      for (const Words& words : codes) {
        require(words.count == lines.words<T>(), "each message must have the words of the code");
        messages.push_back(words.at);
      }
      const py::gil_scoped_release unlocked;
      if (hinge_bits == 8) {
        mpitopk::merge_lines<T, std::int8_t>(pool_, isa_, lines, messages, static_cast<T>(divisor), to.data);
      } else {
        mpitopk::merge_lines<T, std::int16_t>(pool_, isa_, lines, messages, static_cast<T>(divisor), to.data);
      }
      return true;
    });
  }

  bool divide(const py::array& x, double divisor) {
    return visit<float, double>("x", x, [&](auto v) {
      using T = std::remove_pointer_t<decltype(v.data)>;
      const py::gil_scoped_release unlocked;
      return all_parts(pool_, v.size, [&](size_t i, size_t n) {
        return run_on<Divide>(isa_, v.data + i, n, static_cast<T>(divisor));
      });
    });
  }

  float read_floor(const py::array& x) {
    const auto v = as<const float>("x", x);
    const py::gil_scoped_release unlocked;
    std::atomic<std::uint32_t> most{0};
    for_parts(pool_, v.size, [&](size_t i, size_t n) {
      const std::uint32_t mine = run_on<ReadFloor>(isa_, v.data + i, n);
      for (std::uint32_t seen = most; mine > seen && !most.compare_exchange_weak(seen, mine);) {
      }
    });
    return std::bit_cast<float>(most.load());
  }

  void add_floor(const py::array& gradient, const py::array& residual) {
    const auto g = as<const float>("gradient", gradient);
    const auto r = as<float>("residual", residual);
    require(g.size == r.size, "gradient and residual must be of one length");
    const py::gil_scoped_release unlocked;
    for_parts(pool_, g.size, [&](size_t i, size_t n) { run_on<AddFloor>(isa_, g.data + i, r.data + i, n); });
  }

 private:
  static constexpr size_t streaming_bytes = size_t{16} << 20;

  static size_t stretches(size_t size) { return (size + Sum::stretch - 1) / Sum::stretch; }

  // Add up `sums_`, stretch by stretch, and take the square root.
  double root_of_sums() {
    while (sums_.size() > 1) {
      fewer_.resize(stretches(sums_.size()));
      run_on<Sum>(isa_, static_cast<const double*>(sums_.data()), sums_.size(), fewer_.data(), false);
      sums_.swap(fewer_);
    }
    return sums_.empty() ? 0.0 : std::sqrt(sums_[0]);
  }

  static Isa parse(const std::string& name) {
    for (const std::string& known : isas()) {
      if (name == known) return name == "avx2" ? Isa::avx2 : Isa::scalar;
    }
    throw py::value_error("isa: " + name + " is unknown or cannot run here");
  }

  static constexpr int longest_code = 15;  // bits of an entry: gap 1, sign, level 64 to 127

  static size_t words_of(size_t size, int bits) { return (size + group - 1) / group * static_cast<size_t>(bits); }

  static Levels levels_of(const py::array& levels) {
    const auto given = as<const float>("levels", levels);
    const int bits = static_cast<int>(std::bit_width(given.size));
    require(bits >= 2 && bits <= most_bits && std::has_single_bit(given.size), "levels: 2, 4, 8, ... or 128");
    return Levels(given.data, bits);
  }

  // Call f with the gradient and where its scales are.
  template <class F>
  bool with_scales(const py::array& gradient, const py::array& scales, size_t bucket, F&& f) {
    require(bucket > 0 && bucket % group == 0, "bucket: a multiple of 32");
    return visit<const float, const double, const Half, const Bfloat>("gradient", gradient, [&](auto g) {
      using T = Accumulator<std::remove_const_t<std::remove_pointer_t<decltype(g.data)>>>;
      const auto to = as<T>("scales", scales);
      require(to.size == (g.size + bucket - 1) / bucket, "scales: one for each bucket");
      return f(g, to.data);
    });
  }

  template <class T>
  Selector<T>& selector() {
    if constexpr (std::is_same_v<T, float>) {
      return floats_;
    } else {
      return doubles_;
    }
  }

  template <class T>
  Combine<T>& combine_of() {
    if constexpr (std::is_same_v<T, float>) {
      return float_sums_;
    } else {
      return double_sums_;
    }
  }

  template <class T>
  Above<T>& above() {
    if constexpr (std::is_same_v<T, float>) {
      return floats_above_;
    } else {
      return doubles_above_;
    }
  }

  // Call f with the gradient and the accumulator that goes with it.
  template <class F>
  bool with_gradient(const py::array& gradient, const py::array& out, F&& f) {
    return visit<const float, const double, const Half, const Bfloat>("gradient", gradient, [&](auto g) {
      using T = Accumulator<std::remove_const_t<std::remove_pointer_t<decltype(g.data)>>>;
      const auto o = as<T>("out", out);
      require(g.size == o.size, "gradient and out must be of one length");
      return f(g, o);
    });
  }

  template <class T, class Source>
  bool select_from(const Source& source, size_t size, T* clear, const py::array& pieces, const py::array& counts,
                   const py::array& indices, const py::array& values) {
    const Plan plan(pieces, counts);
    const auto where = as<Index>("indices", indices);
    const auto what = as<T>("values", values);
    Selector<T>& selector = this->selector<T>();
    selector.prepare(size, plan.pieces.data, plan.pieces.size, plan.counts.data, plan.counts.size);
    require(where.size == selector.total() && what.size == selector.total(),
            "indices and values must have room for the sum of counts");
    const py::gil_scoped_release unlocked;
    const bool finite = selector.run(source, clear, where.data, what.data);
    candidates_ = selector.candidates();
    return finite;
  }

  // Call f(x, its sparse pieces, indices, values), the last two of one length, without Python's lock.
  template <class F>
  static size_t with_room(const py::array& x, const py::array& pieces, const py::array& indices,
                          const py::array& values, F&& f) {
    const auto where = as<Index>("indices", indices);
    return visit<float, double>("x", x, [&](auto v) {
      const auto what = as<std::remove_pointer_t<decltype(v.data)>>("values", values);
      require(where.size == what.size, "indices and values must be of one length");
      const std::vector<Dense> parts = sparse_of(pieces, v.size);
      const py::gil_scoped_release unlocked;
      return f(v, parts, where, what);
    });
  }

  template <class T>
  Buffer<T>& most_of() {
    if constexpr (std::is_same_v<T, float>) {
      return floats_most_;
    } else {
      return doubles_most_;
    }
  }

  // The words of code of each message.
  static std::vector<Words> words_of(const py::array& buffer, const Numbers& starts, const Numbers& counts) {
    const auto bytes = as<const std::uint8_t>("buffer", buffer);
    require(starts.size() == counts.size(), "starts and counts must be of one length");
    std::vector<Words> words;
    for (size_t p = 0; p < starts.size(); ++p) {
      const auto start = static_cast<size_t>(starts[p]) + header_bytes;
      const auto count = static_cast<size_t>(counts[p]);
      require(starts[p] >= 0 && counts[p] >= 0 && start <= bytes.size && count <= (bytes.size - start) / 4,
              "a message lies outside of the buffer");
      words.push_back({reinterpret_cast<const std::uint32_t*>(bytes.data + start), count});
    }
    return words;
  }

  template <class T, class F>
  std::ptrdiff_t merged(const py::array& buffer, const Numbers& starts, const Numbers& counts, int itemsize,
                        const py::array& dense, double divisor, size_t size, F&& f) {
    switch (itemsize) {
      case 2:
        return merged_of<T, Half>(buffer, starts, counts, dense, divisor, size, f);
      case 4:
        return merged_of<T, float>(buffer, starts, counts, dense, divisor, size, f);
      case 8:
        return merged_of<T, double>(buffer, starts, counts, dense, divisor, size, f);
      default:
        throw py::value_error("itemsize: 2, 4 or 8");
    }
  }

  template <class T, class W, class F>
  std::ptrdiff_t merged_of(const py::array& buffer, const Numbers& starts, const Numbers& counts,
                           const py::array& dense, double divisor, size_t size, F& f) {
    const auto bytes = as<const std::uint8_t>("buffer", buffer);
    const std::vector<Dense> pieces = dense_of(dense, size);
    require(starts.size() == counts.size(), "starts and counts must be of one length");
    std::vector<Incoming<W>> messages;
    for (size_t p = 0; p < starts.size(); ++p) {
      const auto start = static_cast<size_t>(starts[p]);
      const auto count = static_cast<size_t>(counts[p]);
      require(starts[p] >= 0 && counts[p] >= 0 && start + header_bytes <= bytes.size && count <= bytes.size / 4,
              "a message lies outside of the buffer");
      messages.emplace_back(bytes.data + start, count);
      const auto* end = reinterpret_cast<const std::uint8_t*>(messages.back().values + count + total_of(pieces));
      require(end <= bytes.data + bytes.size, "a message lies outside of the buffer");
    }
    const py::gil_scoped_release unlocked;
    const Merge<T, W> merge(pool_, isa_, messages, pieces, static_cast<T>(divisor), size);
    const std::ptrdiff_t bad = merge.corrupt();
    return bad >= 0 ? -1 - bad : static_cast<std::ptrdiff_t>(f(merge));
  }

  Pool pool_;
  const Isa isa_;
  Selector<float> floats_;
  Selector<double> doubles_;
  Above<float> floats_above_;
  Above<double> doubles_above_;
  Cut cut_;
  Combine<float> float_sums_;
  Combine<double> double_sums_;
  RandomIndices random_;
  size_t candidates_ = 0;
  std::vector<double> sums_, fewer_;
  Buffer<float> floats_most_;
  Buffer<double> doubles_most_;
};

template <void (*topk)(const float*, size_t, size_t, Index*, float*)>
void baseline(const py::array& x, const py::array& indices, const py::array& values) {
  const auto from = as<const float>("x", x);
  const auto where = as<Index>("indices", indices);
  const auto what = as<float>("values", values);
  require(where.size == what.size && where.size < from.size, "indices and values: as long, and shorter than x");
  const py::gil_scoped_release unlocked;
  topk(from.data, from.size, where.size, where.data, what.data);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.def("isas", &isas);
  py::class_<Engine>(m, "Engine")
      .def(py::init<int, const std::string&>(), py::arg("threads"), py::arg("isa"))
      .def_property_readonly("threads", &Engine::threads)
      .def_property_readonly("isa", &Engine::isa)
      .def_property_readonly("fallbacks", &Engine::fallbacks)
      .def_property_readonly("candidates", &Engine::candidates)
      .def("finite", &Engine::finite)
      .def("zero_nonfinite", &Engine::zero_nonfinite)
      .def("accumulate", &Engine::accumulate, py::arg("gradient"), py::arg("residual"), py::arg("out"),
           py::arg("scale") = 1.0, py::arg("keep") = 1.0)
      .def("norm", &Engine::norm)
      .def("accumulate_norm", &Engine::accumulate_norm)
      .def("accumulate_select", &Engine::accumulate_select)
      .def("select", &Engine::select)
      .def("move_above", &Engine::move_above)
      .def("search_above", &Engine::search_above)
      .def("chunk_maxima", &Engine::chunk_maxima)
      .def("sample", &Engine::sample)
      .def("random_indices", &Engine::random_indices)
      .def("take", &Engine::take)
      .def("pack", &Engine::pack)
      .def("merge", &Engine::merge)
      .def("merge_sparse", &Engine::merge_sparse)
      .def("select_bins", &Engine::select_bins)
      .def("pack_bins", &Engine::pack_bins)
      .def("merge_bins", &Engine::merge_bins)
      .def("combine", &Engine::combine)
      .def("put_back", &Engine::put_back)
      .def("quantize", &Engine::quantize)
      .def("merge_codes", &Engine::merge_codes)
      .def("to_elias", &Engine::to_elias)
      .def("from_elias", &Engine::from_elias)
      .def("count_ratios", &Engine::count_ratios)
      .def("encode_lines", &Engine::encode_lines)
      .def("merge_lines", &Engine::merge_lines)
      .def("divide", &Engine::divide);
  m.def("read_floor", &Engine::read_floor);
  m.def("add_floor", &Engine::add_floor);
  m.def("nth_element_topk", baseline<nth_element_topk>);
  m.def("radix_topk", baseline<radix_topk>);
}
