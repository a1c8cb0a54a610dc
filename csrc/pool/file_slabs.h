// Slabs of a file that has no name.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "slab_source.h"

namespace memswap {

class NamelessFile;

// Extents of one file in the directory `path` or, where `path` is no directory, beside it under a
// name that begins with its last part. The file never shows (O_TMPFILE) or is unlinked at once, so
// that a crash leaves nothing behind. Space is set aside when an extent is acquired: a full disk
// is a std::system_error there, never in the middle of a write, and a released extent's space
// returns to the disk.
//
// Transfers go past the page cache (O_DIRECT) where the file system takes that; memory that is not
// aligned for it goes through a bounce buffer of the calling thread. A pool over this source needs
// an alignment of kAlignment. Slabs have no address.
class FileSlabs final : public SlabSource {
 public:
  static constexpr size_t kAlignment = 4096;  // bytes; enough for O_DIRECT on any Linux disk

  // Throws std::system_error, with the path, if no file can be made there.
  explicit FileSlabs(const std::string& path);

  SlabResult acquire(size_t nbytes) override;
  size_t granted(size_t nbytes) const override;

  // Whether transfers go past the page cache.
  bool direct() const;

 private:
  std::shared_ptr<NamelessFile> file_;
};

}  // namespace memswap
