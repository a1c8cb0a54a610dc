#include "process_mark.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

namespace memswap {
namespace {

// mmap and madvise take whole pages, and round this up to one.
constexpr size_t kBytes = 1;

}  // namespace

ProcessMark::ProcessMark() : pid_(getpid()) {
  void* const page =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    return;
  }
  if (madvise(page, kBytes, MADV_WIPEONFORK) != 0) {  // before Linux 4.14
    munmap(page, kBytes);
    return;
  }
  *static_cast<char*>(page) = 1;
  page_ = static_cast<char*>(page);
}

ProcessMark::~ProcessMark() {
  if (page_ != nullptr) {
    munmap(const_cast<char*>(page_), kBytes);
  }
}

bool ProcessMark::forked() const { return page_ != nullptr ? *page_ == 0 : getpid() != pid_; }

}  // namespace memswap
