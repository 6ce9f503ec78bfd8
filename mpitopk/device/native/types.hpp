// The number formats: bits, magnitudes, and conversions that round the same way on every machine.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace mpitopk {

using std::size_t;
using Index = std::uint32_t;

struct Half {
  std::uint16_t bits;
};

struct Bfloat {
  std::uint16_t bits;
};

// `magnitude` masks the sign away; what is left orders like the absolute value, Inf above every
// finite number and NaN above Inf. `none` is a threshold above all of them.
template <class Unsigned, Unsigned Infinity, int Mantissa>
struct FormatOf {
  using Bits = Unsigned;
  static constexpr Bits magnitude = static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1);
  static constexpr Bits infinity = Infinity;
  static constexpr Bits none = static_cast<Bits>(magnitude + 1);
  static constexpr int mantissa = Mantissa;
  // 2^-32 of what overflows: what is accumulated stays below it, so that no sum over ranks overflows. Half
  // precision has nothing so large.
  static constexpr Bits too_large = Infinity > (Bits{32} << Mantissa) ? Infinity - (Bits{32} << Mantissa) : Infinity;
};

template <class T>
struct Format;
template <>
struct Format<float> : FormatOf<std::uint32_t, 0x7f800000u, 23> {};
template <>
struct Format<double> : FormatOf<std::uint64_t, 0x7ff0000000000000u, 52> {};
template <>
struct Format<Half> : FormatOf<std::uint16_t, 0x7c00u, 10> {};
template <>
struct Format<Bfloat> : FormatOf<std::uint16_t, 0x7f80u, 7> {};

template <class T>
using Bits = typename Format<T>::Bits;

template <class T>
inline Bits<T> bits_of(T value) {
  return std::bit_cast<Bits<T>>(value);
}

template <class T>
inline Bits<T> key_of(T value) {
  return static_cast<Bits<T>>(bits_of(value) & Format<T>::magnitude);
}

// What a gradient of type G is accumulated in.
template <class G>
using Accumulator = std::conditional_t<std::is_same_v<G, double>, double, float>;

template <class T, class G>
inline T widen(G value) {
  if constexpr (std::is_same_v<G, Bfloat>) {
    return static_cast<T>(std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16));
  } else if constexpr (std::is_same_v<G, Half>) {
    // No branch and no subnormal operand, so that it vectorises and ignores flush-to-zero modes.
    const std::uint32_t sign = (value.bits & 0x8000u) << 16;
    const std::uint32_t rest = value.bits & 0x7fffu;
    const std::uint32_t normal = (rest << 13) + (112u << 23);
    const std::uint32_t small = bits_of(static_cast<float>(static_cast<int>(rest)) * 0x1p-24f);
    const std::uint32_t quiet = rest > 0x7c00u ? 0x400000u : 0u;
    const std::uint32_t special = (normal + (112u << 23)) | quiet;
    const std::uint32_t bits = rest < 0x400u ? small : rest < 0x7c00u ? normal : special;
    return static_cast<T>(std::bit_cast<float>(sign | bits));
  } else {
    return static_cast<T>(value);
  }
}

// Round to half precision: to nearest even, clamped to the largest finite number.
template <class T>
inline Half to_half(T value) {
  constexpr int mantissa = Format<T>::mantissa;
  constexpr Bits<T> bias = (Format<T>::infinity >> mantissa) / 2;
  const T size = std::min(std::bit_cast<T>(key_of(value)), T{65504});
  // Adding and subtracting a power of two whose last bit is worth as much as the last bit of the
  // result makes the processor do the rounding. Below 2^-14 the last bit is worth 2^-24.
  const Bits<T> exponent = std::max<Bits<T>>(bits_of(size) >> mantissa, bias - 14);
  const T magic = std::bit_cast<T>((exponent + (mantissa - 10)) << mantissa);
  const T rounded = (size + magic) - magic;
  const auto normal =
      static_cast<std::uint32_t>((bits_of(rounded) >> (mantissa - 10)) - ((bias - 15) << 10));
  const auto small = static_cast<std::uint32_t>(static_cast<std::int32_t>(rounded * T{0x1p24}));
  const std::uint32_t bits = rounded < T{0x1p-14} ? small : normal;
  const auto sign = static_cast<std::uint32_t>(bits_of(value) >> (sizeof(T) * 8 - 16)) & 0x8000u;
  return Half{static_cast<std::uint16_t>(sign | bits)};
}

// Round to the type that travels, never to Inf.
template <class W, class T>
inline W narrow(T value) {
  if constexpr (std::is_same_v<W, Half>) {
    return to_half(value);
  } else if constexpr (sizeof(W) < sizeof(T)) {
    constexpr T most = std::numeric_limits<W>::max();
    return static_cast<W>(std::min(std::max(value, -most), most));
  } else {
    return static_cast<W>(value);
  }
}

}  // namespace mpitopk
