#include "numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <fstream>
#include <string>
#include <utility>

namespace memswap {

namespace {

constexpr unsigned long kMostNodes = 1024;  // as many as any Linux kernel is built for
constexpr size_t kBitsPerWord = sizeof(unsigned long) * CHAR_BIT;
using NodeMask = std::array<unsigned long, kMostNodes / kBitsPerWord>;

NodeMask only(int node) {
  NodeMask mask{};
  const auto bit = static_cast<size_t>(node);
  mask[bit / kBitsPerWord] = 1UL << (bit % kBitsPerWord);
  return mask;
}

// Prefers `node` for pages that this thread touches, until the end of the scope.
class PreferredNode {
 public:
  explicit PreferredNode(int node) {
    if (syscall(SYS_get_mempolicy, &mode_, before_.data(), kMostNodes, nullptr, 0UL) != 0) {
      return;  // not allowed here (a container's filter): the memory comes from any node
    }
    const NodeMask mask = only(node);
    changed_ = syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask.data(), kMostNodes) == 0;
  }
  ~PreferredNode() {
    if (changed_) {
      syscall(SYS_set_mempolicy, mode_, before_.data(), kMostNodes);
    }
  }
  PreferredNode(const PreferredNode&) = delete;
  PreferredNode& operator=(const PreferredNode&) = delete;

 private:
  int mode_ = MPOL_DEFAULT;
  NodeMask before_{};
  bool changed_ = false;
};

}  // namespace

int numa_nodes(const std::string& root) {
  // "0-1" or "0,2-3"
  std::ifstream online(root + "/sys/devices/system/node/online");
  int nodes = 0;
  int first = 0;
  while (online >> first) {
    int last = first;
    if (online.peek() == '-') {
      online.get();
      online >> last;
    }
    nodes += last - first + 1;
    if (online.peek() == ',') {
      online.get();
    }
  }
  return std::max(nodes, 1);
}

std::optional<int> numa_node_of_pci(const std::string& address, const std::string& root) {
  std::ifstream file(root + "/sys/bus/pci/devices/" + address + "/numa_node");
  int node = -1;
  if (!(file >> node) || node < 0) {
    return std::nullopt;
  }
  return node;
}

NumaSlabs::NumaSlabs(SlabSourcePtr upstream, int node)
    : upstream_(std::move(upstream)), node_(node) {
  if (node < 0 || node >= static_cast<int>(kMostNodes)) {
    throw std::invalid_argument("a NUMA node is between 0 and " + std::to_string(kMostNodes - 1) +
                                ", found " + std::to_string(node));
  }
}

SlabResult NumaSlabs::acquire(size_t nbytes) {
  const PreferredNode preferred(node_);
  SlabResult result = upstream_->acquire(nbytes);
  if (result.slab && result.slab->data() != nullptr) {
    const NodeMask mask = only(node_);
    // mbind takes whole pages; a first byte that starts none is refused, and the thread's policy
    // has to do. So does a refusal by a container's filter.
    syscall(SYS_mbind, result.slab->data(), result.slab->size(), MPOL_PREFERRED, mask.data(),
            kMostNodes, 0U);
  }
  return result;
}

}  // namespace memswap
