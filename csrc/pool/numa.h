// Memory on the NUMA node that a device hangs on. Linux system calls; libnuma is not needed.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "slab_source.h"

namespace memswap {

// Online NUMA nodes of this machine; 1 where the system does not say.
int numa_nodes(const std::string& root = "/");

// Node of the PCI device at `address` (domain:bus:device.function, hexadecimal, as in
// "0000:17:00.0"), or nullopt where the system does not know. `root`: where sys is.
std::optional<int> numa_node_of_pci(const std::string& address, const std::string& root = "/");

// Has the source below take its memory from one node, as far as that node has any: a preference,
// never a reason to fail. Pages are placed when they are touched or pinned, so the policy is set
// for the calling thread while the source works, and for the slab's pages that are touched later.
class NumaSlabs final : public SlabSource {
 public:
  NumaSlabs(SlabSourcePtr upstream, int node);

  SlabResult acquire(size_t nbytes) override;
  size_t granted(size_t nbytes) const override { return upstream_->granted(nbytes); }
  size_t room() const override { return upstream_->room(); }
  void trim() override { upstream_->trim(); }

 private:
  SlabSourcePtr upstream_;
  int node_;
};

}  // namespace memswap
