// Fences and atomics. As in CUDA an atomic orders nothing but itself, and a fence before and after makes
// it publish; ThreadSanitizer is told so, since it does not know fences.
#pragma once

inline void __threadfence() {
#if defined(__SANITIZE_THREAD__)
  cudasim::Thread& me = *cudasim::current;
  for (unsigned i = 0; i < me.n_seen; ++i) __tsan_acquire(me.seen[i]);
  me.n_seen = 0;
  me.fenced = true;
#else
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

namespace cudasim {

inline void before_atomic([[maybe_unused]] void* p) {
#if defined(CUDASIM_CHECKED)
  cudasim_yield();
#endif
  CUDASIM_TSAN(if (current->fenced) __tsan_release(p);)
}

inline void after_atomic([[maybe_unused]] void* p) {
#if defined(__SANITIZE_THREAD__)
  Thread& me = *current;
  if (me.fenced) __tsan_release(p);
  me.seen[me.n_seen < 8 ? me.n_seen++ : 7] = p;
#endif
}

// Replace *p by f(*p); return what was there.
template <class T, class F>
T update(T* p, F&& f) {
  before_atomic(p);
  T old, next;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  do {
    next = f(old);
  } while (!__atomic_compare_exchange(p, &old, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  after_atomic(p);
  return old;
}

}  // namespace cudasim

#define CUDASIM_ATOMIC(name, next)                                    \
  inline unsigned name(unsigned* p, unsigned value) {                 \
    return cudasim::update(p, [&](unsigned old) { return next; });    \
  }
CUDASIM_ATOMIC(atomicAdd, old + value)
CUDASIM_ATOMIC(atomicSub, old - value)
CUDASIM_ATOMIC(atomicMax, std::max(old, value))
CUDASIM_ATOMIC(atomicMin, std::min(old, value))
CUDASIM_ATOMIC(atomicAnd, old & value)
CUDASIM_ATOMIC(atomicOr, old | value)
CUDASIM_ATOMIC(atomicExch, (static_cast<void>(old), value))
#undef CUDASIM_ATOMIC

inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long value) {
  return cudasim::update(p, [&](unsigned long long old) { return old + value; });
}

inline unsigned atomicCAS(unsigned* p, unsigned expected, unsigned value) {
  return cudasim::update(p, [&](unsigned old) { return old == expected ? value : old; });
}
