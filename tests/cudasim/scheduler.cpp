// Runs kernels: a thread of the system for each block that is under way, a fiber for each CUDA thread.
// Built without -fsanitize=thread, so that its own accesses are not seen, but with CUDASIM_TSAN_LANE there.
#include <link.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda.hpp"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#if defined(CUDASIM_COUNT_LANE)
#include "count.hpp"
#endif
#if defined(CUDASIM_TSAN_LANE)
#include <sanitizer/tsan_interface.h>
#define TSAN(x) x
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#else
#define TSAN(x)
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define ASAN(x) x
#else
#define ASAN(x)
#endif

namespace cudasim {
__thread Thread* current __attribute__((tls_model("initial-exec")));
}

namespace {

using namespace cudasim;

#if defined(__SANITIZE_ADDRESS__) || defined(CUDASIM_TSAN_LANE)
constexpr size_t stack_size = 256 * 1024;
#else
constexpr size_t stack_size = 64 * 1024;
#endif
constexpr unsigned char unset = 0xA5;  // what shared memory holds before it is written
constexpr unsigned warp = 32;

enum Order { forward, backward, shuffled };
struct Config {
  unsigned workers = 0;
  int order = forward;
  unsigned seed = 1;
  unsigned yields = 0;  // of 1000 atomics in a checked build
} config;

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
cudasim_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    subq $8, %rsp; stmxcsr (%rsp); fnstcw 4(%rsp)
    movq %rsp, (%rdi); movq %rsi, %rsp
    ldmxcsr (%rsp); fldcw 4(%rsp); addq $8, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");
extern "C" void cudasim_switch(void** save, void* to);
#else
#error "a context switch for this processor is missing"
#endif

struct Launch {
  const Kernel* kernel;
  void** arguments;
  dim3 grid, block;
  size_t dynamic_shared;
  std::atomic<unsigned long long> next{0};
  std::atomic<unsigned> running{0};
  std::atomic<bool> failed{false};
  char message[512] = {};

  bool has_failed() const { return failed.load(std::memory_order_relaxed); }

  void fail(const char* format, ...) __attribute__((format(printf, 2, 3))) {
    if (failed.exchange(true)) return;
    TSAN(AnnotateIgnoreReadsBegin("", 0); AnnotateIgnoreWritesBegin("", 0);)
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    TSAN(AnnotateIgnoreWritesEnd("", 0); AnnotateIgnoreReadsEnd("", 0);)
  }
};

struct Block;

enum class State { ready, at_barrier, at_warp, done };

struct Fiber : Thread {
  Block* home = nullptr;
  unsigned index = 0;
  State state = State::ready;
  int line = 0;
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  TSAN(void* tsan = nullptr;)
  ASAN(void* asan = nullptr;)
};

// Where the lanes of one mask meet. Values alternate between two rows: a lane reads its results before
// it can come again, so that a row is free by the time the operation after the next writes it.
struct Meeting {
  unsigned mask = 0, arrived = 0, unread = 0, turn = 0;
  int operation = 0, line = 0;
  std::uint64_t values[2][warp];
};

// Stacks and meetings are kept from block to block, except under ThreadSanitizer: a new mapping has no past.
struct Pool {
  std::vector<char*> stacks;
  std::vector<Meeting> meetings;

  char* take() {
    if (!stacks.empty()) {
      char* stack = stacks.back();
      stacks.pop_back();
      return stack;
    }
    void* made = mmap(nullptr, stack_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) {
      perror("cudasim: mmap");
      abort();
    }
    return static_cast<char*>(made);
  }

  void give(char* stack) {
    TSAN(munmap(stack, stack_size); return;)
    stacks.push_back(stack);
  }

  Meeting* cleared(unsigned warps) {
    if (meetings.size() < size_t{warps} * warp) meetings.resize(size_t{warps} * warp);
    for (Meeting& meeting : meetings) meeting.mask = meeting.arrived = meeting.unread = meeting.turn = 0;
    return meetings.data();
  }

  ~Pool() {
    for (char* stack : stacks) munmap(stack, stack_size);
  }
};

// Nothing in here is allocated or moved while fibers run: ThreadSanitizer would see it.
struct Block {
  Launch* launch;
  std::vector<Fiber> fibers;
  Meeting* meetings;
  std::vector<Fiber*> ready;  // a ring
  unsigned head = 0, n_ready = 0;
  unsigned alive = 0, arrived = 0, predicates = 0, counted = 0, turn = 0;
  int barrier_line = 0;
  std::uint64_t random;
  void* dynamic_shared = nullptr;
  void* main_stack_pointer = nullptr;
  char sync[2], done;  // addresses that ThreadSanitizer knows barriers and the end by
  TSAN(void* main_tsan = nullptr;)
  ASAN(void* main_asan = nullptr; const void* main_bottom = nullptr; size_t main_size = 0;)

  unsigned mask() const { return static_cast<unsigned>(ready.size()) - 1; }

  void push(Fiber* fiber) {
    fiber->state = State::ready;
    ready[(head + n_ready++) & mask()] = fiber;
  }

  Fiber* pop() {
    const unsigned i = config.order == forward ? 0 : config.order == backward ? n_ready - 1 : draw() % n_ready;
    Fiber*& place = ready[(head + i) & mask()];
    Fiber* fiber = place;
    if (i < n_ready - 1) place = ready[head++ & mask()];
    --n_ready;
    return fiber;
  }

  unsigned draw() {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return static_cast<unsigned>(random >> 32);
  }

  void release() {
    counted = predicates;
    predicates = arrived = 0;
    ++turn;
    for (Fiber& fiber : fibers) {
      if (fiber.state == State::at_barrier) push(&fiber);
    }
  }
};

Fiber* running() { return static_cast<Fiber*>(current); }

void leave(Fiber* fiber, [[maybe_unused]] bool for_good = false) {
  Block* block = fiber->home;
  TSAN(__tsan_switch_to_fiber(block->main_tsan, __tsan_switch_to_fiber_no_sync);)
  ASAN(__sanitizer_start_switch_fiber(for_good ? nullptr : &fiber->asan, block->main_bottom, block->main_size);)
  cudasim_switch(&fiber->stack_pointer, block->main_stack_pointer);
  ASAN(__sanitizer_finish_switch_fiber(fiber->asan, nullptr, nullptr);)
}

void enter(Block* block, Fiber* fiber) {
  current = fiber;
  TSAN(__tsan_switch_to_fiber(fiber->tsan, __tsan_switch_to_fiber_no_sync);)
  ASAN(__sanitizer_start_switch_fiber(&block->main_asan, fiber->stack, stack_size);)
  cudasim_switch(&block->main_stack_pointer, fiber->stack_pointer);
  ASAN(__sanitizer_finish_switch_fiber(block->main_asan, nullptr, nullptr);)
}

void begin() {
  Fiber* fiber = running();
  Block* block = fiber->home;
  ASAN(__sanitizer_finish_switch_fiber(nullptr, &block->main_bottom, &block->main_size);)
  const Launch& launch = *block->launch;
  launch.kernel->call(launch.kernel->function, launch.arguments);
  fiber->state = State::done;
  --block->alive;
  // Threads that have ended no longer count.
  if (block->alive > 0 && block->arrived == block->alive) block->release();
  TSAN(__tsan_release(&block->done);)
  leave(fiber, true);
  abort();
}

void prepare(Fiber* fiber, Pool& pool) {
  fiber->stack = pool.take();
  const size_t spread = (fiber->index & 63) * 128;  // over the sets of the cache
  void** top = reinterpret_cast<void**>(fiber->stack + stack_size - 64 - spread);
  *--top = nullptr;  // for alignment
  *--top = reinterpret_cast<void*>(&begin);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  unsigned sse;
  unsigned short x87;
  asm volatile("stmxcsr %0; fnstcw %1" : "=m"(sse), "=m"(x87));
  --top;
  std::memcpy(top, &sse, sizeof sse);
  std::memcpy(reinterpret_cast<char*>(top) + 4, &x87, sizeof x87);
  fiber->stack_pointer = top;
  TSAN(fiber->tsan = __tsan_create_fiber(0);)
}

// Shared variables are thread-local ones of the kernels' module (or static ones, with AddressSanitizer,
// where they stay zero): find their memory, and let nobody rely on what is in it.
#if !defined(__SANITIZE_ADDRESS__)
struct Storage {
  uintptr_t inside;
  void* data;
  size_t size;
};

int find_storage(dl_phdr_info* info, size_t, void* out) {
  auto& storage = *static_cast<Storage*>(out);
  bool here = false;
  size_t size = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    const uintptr_t start = info->dlpi_addr + part.p_vaddr;
    if (part.p_type == PT_LOAD) here |= storage.inside >= start && storage.inside < start + part.p_memsz;
    if (part.p_type == PT_TLS) size = part.p_memsz;
  }
  if (here) storage = {storage.inside, info->dlpi_tls_data, size};
  return here;
}

void unset_shared(const Kernel* kernel) {
  kernel->touch_shared();
  Storage storage{reinterpret_cast<uintptr_t>(kernel->function), nullptr, 0};
  dl_iterate_phdr(find_storage, &storage);
  if (storage.data != nullptr) std::memset(storage.data, unset, storage.size);
}
#else
void unset_shared(const Kernel*) {}
#endif

uint3 position(unsigned long long i, const dim3& size) {
  return {static_cast<unsigned>(i % size.x), static_cast<unsigned>(i / size.x % size.y),
          static_cast<unsigned>(i / size.x / size.y)};
}

void report_deadlock(Block& block) {
  unsigned at_barrier = 0, at_warp = 0;
  int barrier_line = 0, warp_line = 0;
  for (const Fiber& fiber : block.fibers) {
    if (fiber.state == State::at_barrier) ++at_barrier, barrier_line = fiber.line;
    if (fiber.state == State::at_warp) ++at_warp, warp_line = fiber.line;
  }
  const uint3 at = block.fibers[0].block;
  block.launch->fail("deadlock in block (%u,%u,%u): %u threads wait at a barrier (line %d), %u at a warp operation (line %d)",
                     at.x, at.y, at.z, at_barrier, barrier_line, at_warp, warp_line);
}

void run_block(Launch& launch, unsigned long long number, Pool& pool) {
  auto owned = std::make_unique<Block>();
  Block& block = *owned;
  block.launch = &launch;
  block.random = config.seed * 0x9E3779B97F4A7C15ull + number + 1;
  const unsigned n = launch.block.x * launch.block.y * launch.block.z;
  block.alive = n;
  block.fibers.resize(n);
  unsigned ring = 1;
  while (ring < n) ring *= 2;
  block.ready.resize(ring);
  block.meetings = pool.cleared((n + warp - 1) / warp);
  if (launch.dynamic_shared > 0) {
    if (posix_memalign(&block.dynamic_shared, 128, launch.dynamic_shared) != 0) abort();
    std::memset(block.dynamic_shared, unset, launch.dynamic_shared);
  }
  TSAN(block.main_tsan = __tsan_get_current_fiber();)
  unset_shared(launch.kernel);
  for (unsigned i = 0; i < n; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.home = &block;
    fiber.index = i;
    fiber.lane = i % warp;
    fiber.thread = position(i, launch.block);
    fiber.block = position(number, launch.grid);
    fiber.block_size = launch.block;
    fiber.grid_size = launch.grid;
    prepare(&fiber, pool);
    block.push(&fiber);
  }
  while (block.n_ready > 0 && !launch.has_failed()) enter(&block, block.pop());
  current = nullptr;
  if (block.alive > 0 && !launch.has_failed()) report_deadlock(block);
  TSAN(__tsan_acquire(&block.done);)
  if (launch.has_failed()) {
    // Fibers that have not ended never published what they did: leak them rather than report it.
    TSAN(owned.release(); new std::vector<Meeting>(std::move(pool.meetings)); return;)
  }
  for (Fiber& fiber : block.fibers) {
    TSAN(__tsan_destroy_fiber(fiber.tsan);)
    ASAN(__asan_unpoison_memory_region(fiber.stack, stack_size);)
    pool.give(fiber.stack);
  }
  free(block.dynamic_shared);
}

std::mutex spare_mutex;
std::vector<std::unique_ptr<Pool>> spare;

std::unique_ptr<Pool> take_pool() {
  const std::lock_guard<std::mutex> locked(spare_mutex);
  if (spare.empty()) return std::make_unique<Pool>();
  auto pool = std::move(spare.back());
  spare.pop_back();
  return pool;
}

void give_pool(std::unique_ptr<Pool> pool) {
  const std::lock_guard<std::mutex> locked(spare_mutex);
  spare.push_back(std::move(pool));
}

void work(Launch& launch, unsigned long long n_blocks) {
  auto pool = take_pool();
  for (;;) {
    const unsigned long long i = launch.next.fetch_add(1);
    if (i >= n_blocks || launch.has_failed()) break;
    run_block(launch, config.order == backward ? n_blocks - 1 - i : i, *pool);
  }
  give_pool(std::move(pool));
}

// A thread of its own for each block, so that ThreadSanitizer sees no order between two of them.
[[maybe_unused]] void run_apart(Launch& launch, unsigned long long n_blocks, unsigned workers) {
  std::vector<std::thread> threads;
  for (unsigned long long i = 0; i < n_blocks; ++i) {
    while (launch.running.load(std::memory_order_relaxed) >= workers) usleep(20);
    launch.running.fetch_add(1, std::memory_order_relaxed);
    threads.emplace_back([&launch, i] {
      if (!launch.has_failed()) {
        Pool pool;
        run_block(launch, i, pool);
      }
      launch.running.fetch_sub(1, std::memory_order_relaxed);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

[[maybe_unused]] void run_shared(Launch& launch, unsigned long long n_blocks, unsigned workers) {
  if (workers == 1 || n_blocks == 1) return work(launch, n_blocks);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < workers; ++i) threads.emplace_back(work, std::ref(launch), n_blocks);
  for (std::thread& thread : threads) thread.join();
}

const char* invalid(const Launch& launch, unsigned long long n_blocks, unsigned long long n_threads) {
  const dim3 &grid = launch.grid, &block = launch.block;
  if (n_blocks == 0 || n_threads == 0) return "a dimension is zero";
  if (n_threads > 1024 || block.x > 1024 || block.y > 1024 || block.z > 64) return "more than 1024 threads in a block";
  if (n_threads > launch.kernel->max_threads) return "more threads in a block than __launch_bounds__";
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) return "the grid is too large";
  return nullptr;
}

}  // namespace

namespace cudasim {
extern "C" {

void cudasim_fail(const char* what, int line) {
  Fiber* me = running();
  const uint3 block = me->block, thread = me->thread;
  me->home->launch->fail("%s at line %d, block (%u,%u,%u), thread (%u,%u,%u)", what, line, block.x, block.y, block.z,
                         thread.x, thread.y, thread.z);
  leave(me);
  abort();
}

void cudasim_yield() {
  Fiber* me = running();
  Block* block = me->home;
  if (config.yields == 0 || block->draw() % 1000 >= config.yields) return;
  block->push(me);
  leave(me);
}

void* cudasim_dynamic_shared() { return running()->home->dynamic_shared; }

int cudasim_barrier(int predicate, int line) {
  Fiber* me = running();
  Block* block = me->home;
  if (block->arrived > 0 && block->barrier_line != line) {
    char text[96];
    snprintf(text, sizeof text, "barriers diverge: others of the block wait at line %d", block->barrier_line);
    cudasim_fail(text, line);
  }
  TSAN(char* sync = &block->sync[block->turn & 1]; __tsan_release(sync);)
  block->barrier_line = me->line = line;
  block->predicates += static_cast<unsigned>(predicate);
  if (++block->arrived == block->alive) {
    block->release();
  } else {
    me->state = State::at_barrier;
    leave(me);
  }
  TSAN(__tsan_acquire(sync);)
  return static_cast<int>(block->counted);
}

const std::uint64_t* cudasim_warp(unsigned mask, std::uint64_t value, int operation, int line,
                                  [[maybe_unused]] bool orders) {
  Fiber* me = running();
  Block* block = me->home;
  const unsigned bit = 1u << me->lane, first = me->index - me->lane;
  if ((mask & bit) == 0) cudasim_fail("the lane that calls is not in its mask", line);
  Meeting* const meetings = block->meetings + first;
  Meeting* meeting = nullptr;
  for (unsigned i = 0; i < warp; ++i) {
    Meeting& at = meetings[i];
    if (at.mask == mask || at.mask == 0) {  // nothing was ever used behind one without a mask
      if (at.mask == mask || meeting == nullptr) meeting = &at;
      break;
    }
    if (at.arrived != 0 && (at.mask & mask) != 0) cudasim_fail("lanes wait with masks that overlap but differ", line);
    if (at.arrived == 0 && at.unread == 0 && meeting == nullptr) meeting = &at;
  }
  if (meeting == nullptr) cudasim_fail("too many masks", line);
  meeting->mask = mask;
  const unsigned row = meeting->turn & 1;
  if (meeting->arrived == 0) {
    meeting->operation = operation;
    meeting->line = line;
  } else if (meeting->operation != operation || meeting->line != line) {
    char text[96];
    snprintf(text, sizeof text, "lanes diverge: others of the mask wait at line %d", meeting->line);
    cudasim_fail(text, line);
  }
  meeting->values[row][me->lane] = value;
  meeting->arrived |= bit;
  me->line = line;
  TSAN(if (orders) __tsan_release(&meeting->values[row]);)
  if (meeting->arrived == mask) {
    meeting->arrived = 0;
    meeting->unread = mask;
    ++meeting->turn;
    const unsigned last = std::min<unsigned>(first + warp, static_cast<unsigned>(block->fibers.size()));
    for (unsigned i = first; i < last; ++i) {
      Fiber& fiber = block->fibers[i];
      if (fiber.state == State::at_warp && (mask >> fiber.lane & 1u) != 0) block->push(&fiber);
    }
  } else {
    me->state = State::at_warp;
    leave(me);
  }
  meeting->unread &= ~bit;
  TSAN(if (orders) __tsan_acquire(&meeting->values[row]);)
  return meeting->values[row];
}

// What the Python side calls.
void cudasim_configure(unsigned workers, int order, unsigned seed, unsigned yields) {
  config = {workers, order, seed, yields};
}

const Kernel* cudasim_find(const Kernel* kernel, const char* name) {
  while (kernel != nullptr && std::strcmp(kernel->name, name) != 0) kernel = kernel->next;
  return kernel;
}
const char* cudasim_kinds(const Kernel* kernel) { return kernel->kinds; }
const unsigned* cudasim_sizes(const Kernel* kernel) { return kernel->sizes; }

// 0, or 1 with a message.
int cudasim_launch(const Kernel* kernel, const unsigned* grid, const unsigned* block, size_t dynamic_shared,
                   void** arguments, char* message, size_t length) {
  Launch launch{kernel, arguments, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, dynamic_shared};
  const unsigned long long n_blocks = 1ull * grid[0] * grid[1] * grid[2];
  const unsigned long long n_threads = 1ull * block[0] * block[1] * block[2];
  if (const char* problem = invalid(launch, n_blocks, n_threads)) {
    snprintf(message, length, "invalid configuration: %s", problem);
    return 1;
  }
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  [[maybe_unused]] const unsigned workers = config.workers > 0 ? config.workers : cores;
#if defined(__SANITIZE_ADDRESS__) || defined(CUDASIM_COUNT_LANE)
  run_shared(launch, n_blocks, 1);
#elif defined(CUDASIM_TSAN_LANE)
  run_apart(launch, n_blocks, workers);
#else
  run_shared(launch, n_blocks, workers);
#endif
  if (!launch.has_failed()) return 0;
  snprintf(message, length, "%s", launch.message);
  return 1;
}

}  // extern "C"
}  // namespace cudasim
