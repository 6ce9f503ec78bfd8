// The kernels of a module by name, with the types of their parameters.
#pragma once

namespace cudasim {

struct Kernel {
  const char* name;
  void (*function)();
  void (*call)(void (*)(), void**);
  const char* kinds;  // of each parameter: R pointer to const, P pointer, f floating, i integer, s other
  const unsigned* sizes;
  unsigned max_threads;
  void* (*touch_shared)();
  Kernel* next;
};

[[maybe_unused]] static Kernel* kernels = nullptr;  // not inline: each module has its own

// Touching this makes the thread's copy of the module's shared variables exist.
static thread_local volatile char shared_probe;
[[maybe_unused]] static void* touch_shared() {
  shared_probe = 0;
  return const_cast<char*>(&shared_probe);
}

template <class A>
constexpr char kind() {
  if constexpr (std::is_pointer_v<A>) {
    return std::is_const_v<std::remove_pointer_t<A>> ? 'R' : 'P';
  } else {
    return std::is_floating_point_v<A> ? 'f' : std::is_integral_v<A> ? 'i' : 's';
  }
}

template <class F>
struct Signature;
template <class... A>
struct Signature<void (*)(A...)> {
  static constexpr char kinds[] = {kind<A>()..., 0};
  static constexpr unsigned sizes[] = {unsigned{sizeof(A)}..., 0};

  static void call(void (*function)(), void** arguments) {
    call(reinterpret_cast<void (*)(A...)>(function), arguments, std::index_sequence_for<A...>{});
  }

 private:
  template <size_t... I>
  static void call(void (*function)(A...), [[maybe_unused]] void** arguments, std::index_sequence<I...>) {
    function(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
  }
};

template <class F>
struct Registered {
  Kernel kernel;

  Registered(const char* name, F function, unsigned max_threads)
      : kernel{name,
               reinterpret_cast<void (*)()>(function),
               &Signature<F>::call,
               Signature<F>::kinds,
               Signature<F>::sizes,
               max_threads,
               &touch_shared,
               kernels} {
    kernels = &kernel;
  }
};

}  // namespace cudasim

#define CUDASIM_KERNEL(id, max_threads, ...) \
  static cudasim::Registered<decltype(&__VA_ARGS__)> cudasim_kernel_##id(#__VA_ARGS__, &__VA_ARGS__, max_threads);
#define CUDASIM_TABLE \
  extern "C" const cudasim::Kernel* cudasim_table() { return cudasim::kernels; }
