#include "file_slabs.h"

#include <utility>

#include "nameless_file.h"

namespace memswap {

namespace {

class FileSlab final : public Slab {
 public:
  FileSlab(std::shared_ptr<NamelessFile> file, const Range& extent)
      : file_(std::move(file)), extent_(extent) {}
  ~FileSlab() override { file_->release(extent_); }

  size_t size() const override { return extent_.size; }
  void* data() const override { return nullptr; }
  void write(size_t offset, const void* source, size_t nbytes) override {
    file_->write(extent_.offset + offset, source, nbytes);
  }
  void read(size_t offset, void* destination, size_t nbytes) override {
    file_->read(extent_.offset + offset, destination, nbytes);
  }

 private:
  std::shared_ptr<NamelessFile> file_;
  Range extent_;
};

}  // namespace

FileSlabs::FileSlabs(const std::string& path) : file_(std::make_shared<NamelessFile>(path)) {}

SlabResult FileSlabs::acquire(size_t nbytes) {
  return {std::make_unique<FileSlab>(file_, file_->acquire(nbytes)), {}};
}

size_t FileSlabs::granted(size_t nbytes) const {
  return (nbytes + kAlignment - 1) & ~(kAlignment - 1);
}

bool FileSlabs::direct() const { return file_->direct(); }

}  // namespace memswap
