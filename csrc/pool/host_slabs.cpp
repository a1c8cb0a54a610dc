#include "host_slabs.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>

namespace memswap {

namespace {

// A huge page of the usual size; shorter slabs cannot hold one.
constexpr size_t kHugePage = size_t{2} << 20;

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

size_t round_up(size_t nbytes, size_t multiple) {
  return (nbytes + multiple - 1) / multiple * multiple;
}

class MappedSlab final : public Slab {
 public:
  MappedSlab(size_t nbytes, OrdinarySlabs::Unused unused)
      : size_(nbytes),
        unused_(unused),
        first_(mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (first_ == MAP_FAILED) {
      throw std::system_error(errno, std::generic_category(),
                              "mmap of " + std::to_string(nbytes) + " bytes of host memory");
    }
    if (nbytes >= kHugePage) {
      madvise(first_, nbytes, MADV_HUGEPAGE);  // only a wish: fewer page faults
    }
  }
  ~MappedSlab() override { munmap(first_, size_); }

  size_t size() const override { return size_; }
  void* data() const override { return first_; }
  void write(size_t offset, const void* source, size_t nbytes) override {
    std::memcpy(static_cast<std::byte*>(first_) + offset, source, nbytes);
  }
  void read(size_t offset, void* destination, size_t nbytes) override {
    std::memcpy(destination, static_cast<const std::byte*>(first_) + offset, nbytes);
  }
  // Only pages that nobody else has a part of, and huge ones as a whole: where a part of one is
  // given back, small pages take its place for good, and each write after that faults 512 times.
  // A system that refuses keeps them all.
  void forget(size_t offset, size_t nbytes) override {
    const size_t page = size_ >= kHugePage ? kHugePage : page_bytes();
    const auto first = reinterpret_cast<uintptr_t>(first_) + offset;
    const uintptr_t begins = round_up(first, page);
    const uintptr_t ends = (first + nbytes) / page * page;
    if (unused_ == OrdinarySlabs::Unused::kReturned && begins < ends) {
      (void)madvise(reinterpret_cast<void*>(begins), ends - begins, MADV_DONTNEED);
    }
  }

 private:
  size_t size_;
  OrdinarySlabs::Unused unused_;
  void* first_;
};

}  // namespace

SlabResult OrdinarySlabs::acquire(size_t nbytes) {
  return {std::make_unique<MappedSlab>(granted(nbytes), unused_), {}};
}

size_t OrdinarySlabs::granted(size_t nbytes) const { return round_up(nbytes, page_bytes()); }

}  // namespace memswap
