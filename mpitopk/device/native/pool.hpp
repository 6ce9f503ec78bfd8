// Persistent worker threads. The caller is worker 0, so one thread costs nothing at all.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "isa.hpp"

namespace mpitopk {

// The half-open part of [0, size) that is thread t's, in multiples of `grain`.
inline std::pair<std::size_t, std::size_t> share(std::size_t size, int t, int threads,
                                                 std::size_t grain) {
  const std::size_t units = (size + grain - 1) / grain;
  const auto count = static_cast<std::size_t>(threads);
  const auto at = static_cast<std::size_t>(t);
  const std::size_t each = units / count;
  const std::size_t extra = units % count;
  const std::size_t first = at * each + std::min(at, extra);
  const std::size_t last = first + each + (at < extra ? 1 : 0);
  return {std::min(size, first * grain), std::min(size, last * grain)};
}

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  ~Pool() {
    stop_ = true;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  // How many threads are worth waking for `size` elements of streaming work.
  int useful(std::size_t size) const {
    constexpr std::size_t least = 32768;
    const std::size_t most = size / least + 1;
    return most < static_cast<std::size_t>(threads_) ? static_cast<int>(most) : threads_;
  }

  // Call f(t) for t = 0, 1, ... use - 1, each on its own thread; return when all are done.
  template <class F>
  void run(int use, F&& f) {
    if (use <= 1) {
      f(0);
      return;
    }
    start();
    call_ = [](void* context, int t) { (*static_cast<std::remove_reference_t<F>*>(context))(t); };
    context_ = &f;
    use_ = use;
    pending_.store(threads_ - 1, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    work(0);
    for (int left; (left = settle(pending_, 0)) != 0;) pending_.wait(left);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  // Call f(t, i) for i = 0, 1, ... count - 1, each on the thread that is free first.
  template <class F>
  void each(int use, std::size_t count, F&& f) {
    std::atomic<std::size_t> next{0};
    run(count < static_cast<std::size_t>(use) ? static_cast<int>(count) : use, [&](int t) {
      for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(t, i);
    });
  }

 private:
  // Sleeping and waking costs more than most of our phases: look again for some ten microseconds.
  static int settle(const std::atomic<int>& value, int wanted) {
    for (int i = 0; i < 256; ++i) {
      if (value.load(std::memory_order_acquire) == wanted) return wanted;
      pause();
    }
    return value.load(std::memory_order_acquire);
  }

  void start() {
    for (int t = static_cast<int>(workers_.size()) + 1; t < threads_; ++t) {
      workers_.emplace_back(&Pool::loop, this, t, generation_.load());
    }
  }

  void work(int t) {
    if (t >= use_) return;
    try {
      call_(context_, t);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  void loop(int t, int seen) {
    while (true) {
      for (int i = 0; i < 256 && generation_.load(std::memory_order_acquire) == seen; ++i) pause();
      generation_.wait(seen, std::memory_order_acquire);
      seen = generation_.load(std::memory_order_acquire);
      if (stop_) return;
      work(t);
      if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) pending_.notify_one();
    }
  }

  const int threads_;
  std::vector<std::thread> workers_;
  std::atomic<int> generation_{0};
  std::atomic<int> pending_{0};
  std::atomic<bool> stop_{false};
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int use_ = 0;
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace mpitopk
