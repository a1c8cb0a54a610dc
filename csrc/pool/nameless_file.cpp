#include "nameless_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "file_slabs.h"
#include "work/ticket.h"

namespace memswap {

namespace {

constexpr size_t kAlignment = FileSlabs::kAlignment;
constexpr size_t kFileSpace = size_t{1} << 62;    // addresses; off_t has 63 bits
constexpr size_t kBounceBytes = size_t{1} << 20;  // long enough for a disk's full rate
constexpr size_t kLongestCall = size_t{1} << 30;  // Linux moves at most 2 GiB - 4 KiB per call

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::string reason(int error) { return std::generic_category().message(error); }

int open_nameless(const std::string& path) {
  struct stat status{};
  const bool directory = stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
  const size_t slash = path.rfind('/');
  std::string folder = path;
  if (!directory) {
    folder = slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
  }
  const int nameless = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (nameless >= 0) {
    return nameless;
  }
  // EISDIR: an old kernel; EOPNOTSUPP: NFS, overlayfs of older kernels.
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL) {
    fail("could not make a file in " + folder);
  }
  const std::string name = (directory ? path + "/memswap-" : path + "-") + "XXXXXX";
  std::vector<char> made(name.begin(), name.end());
  made.push_back('\0');
  const int named = mkostemp(made.data(), O_CLOEXEC);
  if (named < 0) {
    fail("could not make a file " + name);
  }
  if (unlink(made.data()) != 0) {
    const int error = errno;
    close(named);
    errno = error;
    fail("could not unlink " + std::string(made.data()));
  }
  return named;
}

bool aligned(const void* address, size_t nbytes) {
  return reinterpret_cast<std::uintptr_t>(address) % kAlignment == 0 && nbytes % kAlignment == 0;
}

struct FreeAligned {
  void operator()(std::byte* bytes) const { operator delete(bytes, std::align_val_t{kAlignment}); }
};

// One per thread, made when first needed.
std::byte* bounce_buffer() {
  thread_local const std::unique_ptr<std::byte, FreeAligned> buffer(
      static_cast<std::byte*>(operator new(kBounceBytes, std::align_val_t{kAlignment})));
  return buffer.get();
}

}  // namespace

NamelessFile::NamelessFile(const std::string& path)
    : path_(path), descriptor_(open_nameless(path)), space_(kAlignment) {
  space_.add_slab(0, kFileSpace);
  set_direct(true);
}

NamelessFile::~NamelessFile() { close(descriptor_); }

void NamelessFile::set_direct(bool direct) {
  const int flags = fcntl(descriptor_, F_GETFL);
  const int wanted = direct ? flags | O_DIRECT : flags & ~O_DIRECT;
  direct_ = flags >= 0 && fcntl(descriptor_, F_SETFL, wanted) == 0 && direct;
}

Range NamelessFile::acquire(size_t nbytes) {
  std::optional<Range> extent;
  {
    const std::lock_guard lock(mutex_);
    extent = space_.allocate(nbytes);
  }
  if (!extent) {
    throw std::length_error("a file cannot hold " + std::to_string(nbytes) + " bytes more");
  }
  const auto offset = static_cast<off_t>(extent->offset);
  const auto size = static_cast<off_t>(extent->size);
  int error = 0;
  do {
    error = fallocate(descriptor_, 0, offset, size) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == EOPNOTSUPP || error == ENOSYS) {
    // Writes a byte into every block instead, which O_DIRECT would not take; such a file system
    // is left to its page cache for good.
    set_direct(false);
    do {
      error = posix_fallocate(descriptor_, offset, size);
    } while (error == EINTR);
  }
  if (error != 0) {
    release(*extent);  // what a full disk did give
    errno = error;
    fail("could not set " + std::to_string(extent->size) + " bytes aside in " + path_);
  }
  return *extent;
}

void NamelessFile::release(const Range& extent) {
  // A file system without holes keeps the space until the file is closed, or uses it again.
  (void)fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(extent.offset), static_cast<off_t>(extent.size));
  const std::lock_guard lock(mutex_);
  space_.free(extent);
}

void NamelessFile::write(size_t offset, const void* source, size_t nbytes) {
  const auto* bytes = static_cast<const std::byte*>(source);
  size_t done = 0;
  while (done < nbytes) {
    const size_t moved = write_some(offset + done, bytes + done, nbytes - done);
    if (moved == 0) {
      const int error = errno;
      throw TransferError("writing to the swap file in " + path_ + " failed at offset " +
                          std::to_string(offset + done) + ": " + reason(error) + "; expected " +
                          std::to_string(nbytes) + " bytes from offset " + std::to_string(offset) +
                          ", wrote " + std::to_string(done) + ". The source in memory is intact.");
    }
    done += moved;
  }
}

void NamelessFile::read(size_t offset, void* destination, size_t nbytes) {
  auto* bytes = static_cast<std::byte*>(destination);
  size_t done = 0;
  while (done < nbytes) {
    errno = 0;
    const size_t moved = read_some(offset + done, bytes + done, nbytes - done);
    if (moved == 0) {
      const int error = errno;
      throw TransferError("reading the swap file in " + path_ + " failed at offset " +
                          std::to_string(offset + done) + ": " +
                          (error == 0 ? "the file ends there" : reason(error)) + "; expected " +
                          std::to_string(nbytes) + " bytes from offset " + std::to_string(offset) +
                          ", found " + std::to_string(done) +
                          ". The file was changed from outside, or its disk failed.");
    }
    done += moved;
  }
}

// Moves part of the bytes. 0: failed, errno says why.
size_t NamelessFile::write_some(size_t offset, const std::byte* source, size_t nbytes) {
  while (true) {
    const bool direct = direct_;
    const std::byte* from = source;
    size_t part = std::min(nbytes, kLongestCall);
    size_t length = part;
    if (direct && !aligned(source, kAlignment)) {
      part = std::min(nbytes, kBounceBytes);
    } else if (direct && part >= kAlignment) {
      part = part / kAlignment * kAlignment;  // straight from the source; the rest comes next
      length = part;
    }
    if (direct && !aligned(source, part)) {
      length = (part + kAlignment - 1) / kAlignment * kAlignment;
      std::byte* bounce = bounce_buffer();
      std::memcpy(bounce, source, part);
      std::memset(bounce + part, 0, length - part);
      from = bounce;
    }
    const ssize_t moved = pwrite(descriptor_, from, length, static_cast<off_t>(offset));
    if (moved > 0) {
      const size_t whole = std::min(static_cast<size_t>(moved), part);
      // A direct write that stopped inside a block is repeated from the block's start.
      const size_t kept = direct && whole < part ? whole / kAlignment * kAlignment : whole;
      if (kept > 0) {
        return kept;
      }
      errno = EIO;
      return 0;
    }
    if (moved < 0 && errno == EINVAL && (direct || direct_)) {
      // The file system took the flag and not the transfer, or the flag changed under us.
      set_direct(false);
      continue;
    }
    if (moved < 0 && errno == EINTR) {
      continue;
    }
    if (moved == 0) {
      errno = ENOSPC;
    }
    return 0;
  }
}

// Moves part of the bytes. 0: failed, errno says why, or is 0 at the end of the file.
size_t NamelessFile::read_some(size_t offset, std::byte* destination, size_t nbytes) {
  while (true) {
    const bool direct = direct_;
    std::byte* to = destination;
    size_t part = std::min(nbytes, kLongestCall);
    size_t length = part;
    if (direct && !aligned(destination, kAlignment)) {
      part = std::min(nbytes, kBounceBytes);
    } else if (direct && part >= kAlignment) {
      part = part / kAlignment * kAlignment;
      length = part;
    }
    if (direct && !aligned(destination, part)) {
      length = (part + kAlignment - 1) / kAlignment * kAlignment;
      to = bounce_buffer();
    }
    // After a short read a direct read would start inside a block; nothing is there.
    if (direct && offset % kAlignment != 0) {
      return 0;
    }
    const ssize_t moved = pread(descriptor_, to, length, static_cast<off_t>(offset));
    if (moved < 0 && errno == EINVAL && (direct || direct_)) {
      set_direct(false);
      continue;
    }
    if (moved < 0 && errno == EINTR) {
      continue;
    }
    if (moved <= 0) {
      return 0;
    }
    const size_t found = std::min(static_cast<size_t>(moved), part);
    if (to != destination) {
      std::memcpy(destination, to, found);
    }
    return found;
  }
}

}  // namespace memswap
