// Vector types, bits, conversions and rounding, as the CUDA headers define them.
#pragma once

struct alignas(16) float4 {
  float x, y, z, w;
};

namespace cudasim {
template <class To, class From>
To cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace cudasim

inline unsigned __float_as_uint(float x) { return cudasim::cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return cudasim::cast<float>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

#define CUDASIM_ORDER(type)                                           \
  inline type min(type a, type b) { return b < a ? b : a; }           \
  inline type max(type a, type b) { return a < b ? b : a; }
CUDASIM_ORDER(int)
CUDASIM_ORDER(unsigned)
CUDASIM_ORDER(long long)
#undef CUDASIM_ORDER

struct __half {
  unsigned short bits;
};
struct __nv_bfloat16 {
  unsigned short bits;
};

inline float __half2float(__half x) {
  const unsigned sign = (x.bits & 0x8000u) << 16;
  const unsigned exponent = (x.bits >> 10) & 31u;
  const unsigned mantissa = x.bits & 0x3ffu;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return __uint_as_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;
  return sign != 0 ? -subnormal : subnormal;
}

inline __half __float2half_rn(float x) {
  unsigned bits = __float_as_uint(x);
  const unsigned sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return {0x7fff};  // the NaN that CUDA gives
  if (bits >= 0x477ff000u) return {static_cast<unsigned short>(sign | 0x7c00u)};
  if (bits < 0x38800000u) {  // subnormal: the addition rounds
    const float moved = __uint_as_float(bits) + 0.5f;
    return {static_cast<unsigned short>(sign | (__float_as_uint(moved) - 0x3f000000u))};
  }
  bits += 0xfffu + ((bits >> 13) & 1u);
  return {static_cast<unsigned short>(sign | ((bits - 0x38000000u) >> 13))};
}

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return {static_cast<unsigned short>(bits >> 16)};
}
