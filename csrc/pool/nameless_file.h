// One open file without a name, and transfers to and from it.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>

#include "range_allocator.h"

namespace memswap {

// Thread-safe. Offsets of write() and read() are multiples of FileSlabs::kAlignment.
class NamelessFile {
 public:
  explicit NamelessFile(const std::string& path);
  ~NamelessFile();
  NamelessFile(const NamelessFile&) = delete;
  NamelessFile& operator=(const NamelessFile&) = delete;

  // Sets `nbytes` of disk space aside. Throws std::system_error.
  Range acquire(size_t nbytes);
  void release(const Range& extent);

  // Throw TransferError. A direct write is padded with zeros to the next multiple of the alignment.
  void write(size_t offset, const void* source, size_t nbytes);
  void read(size_t offset, void* destination, size_t nbytes);

  bool direct() const { return direct_; }

 private:
  void set_direct(bool direct);
  size_t write_some(size_t offset, const std::byte* source, size_t nbytes);
  size_t read_some(size_t offset, std::byte* destination, size_t nbytes);

  const std::string path_;
  int descriptor_ = -1;
  std::atomic<bool> direct_{false};
  std::mutex mutex_;
  RangeAllocator space_;  // the file's addresses, one slab as long as a file can be
};

}  // namespace memswap
