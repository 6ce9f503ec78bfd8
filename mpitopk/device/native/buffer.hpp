// Scratch memory that only grows and is never initialised: a steady state allocates nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <type_traits>

namespace mpitopk {

template <class T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  // Make room for `size` elements, keeping the first `used`.
  T* reserve(std::size_t size, std::size_t used = 0) {
    if (size > capacity_) {
      const std::size_t capacity = std::max(size, capacity_ + capacity_ / 2);
      std::unique_ptr<T[]> data(new T[capacity]);
      if (used > 0) std::memcpy(data.get(), data_.get(), used * sizeof(T));
      data_ = std::move(data);
      capacity_ = capacity;
    }
    return data_.get();
  }

  T* data() const { return data_.get(); }
  std::size_t capacity() const { return capacity_; }

 private:
  std::unique_ptr<T[]> data_;
  std::size_t capacity_ = 0;
};

}  // namespace mpitopk
