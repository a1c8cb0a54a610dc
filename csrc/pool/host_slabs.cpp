#include "host_slabs.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>

namespace memswap {

namespace {

// A huge page of the usual size; shorter slabs cannot hold one.
constexpr size_t kHugePage = size_t{2} << 20;

class MappedSlab final : public Slab {
 public:
  explicit MappedSlab(size_t nbytes)
      : size_(nbytes),
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

 private:
  size_t size_;
  void* first_;
};

}  // namespace

SlabResult OrdinarySlabs::acquire(size_t nbytes) {
  return {std::make_unique<MappedSlab>(granted(nbytes)), {}};
}

size_t OrdinarySlabs::granted(size_t nbytes) const {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (nbytes + page - 1) / page * page;
}

}  // namespace memswap
