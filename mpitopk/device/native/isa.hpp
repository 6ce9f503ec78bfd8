// What the processor can run, and how one body of code is compiled for each of it.
#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define MPITOPK_HAVE_AVX2 1
#define MPITOPK_AVX2 __attribute__((target("avx2,f16c,popcnt")))
#include <immintrin.h>
#else
#define MPITOPK_HAVE_AVX2 0
#define MPITOPK_AVX2
#endif

#define MPITOPK_AVX2_INLINE MPITOPK_AVX2 __attribute__((always_inline)) inline

#if defined(__GNUC__)
#define MPITOPK_INLINE inline __attribute__((always_inline))
#else
#define MPITOPK_INLINE inline
#endif

namespace mpitopk {

enum class Isa { scalar, avx2 };

inline std::vector<std::string> isas() {
  std::vector<std::string> names{"scalar"};
#if MPITOPK_HAVE_AVX2
  const bool others = __builtin_cpu_supports("f16c") && __builtin_cpu_supports("popcnt");
  if (__builtin_cpu_supports("avx2") && others) names.emplace_back("avx2");
#endif
  return names;
}

// `Body::run` is an always-inline function; inlined into a function with the AVX2 attribute it is
// vectorised by the compiler for AVX2. FMA stays off, so the results are those of scalar code.
template <class Body, class... Args>
auto run_scalar(Args&... args) {
  return Body::template run<Isa::scalar>(args...);
}

template <class Body, class... Args>
MPITOPK_AVX2 auto run_avx2(Args&... args) {
  return Body::template run<Isa::avx2>(args...);
}

template <class Body, class... Args>
auto run_on(Isa isa, Args&&... args) {
  return isa == Isa::avx2 ? run_avx2<Body>(args...) : run_scalar<Body>(args...);
}

inline void pause() {
#if MPITOPK_HAVE_AVX2
  _mm_pause();
#endif
}

}  // namespace mpitopk
