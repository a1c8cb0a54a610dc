#include "in_flight.h"

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "work/without_gil.h"

// As in torch/csrc/distributed/c10d/ProcessGroup.hpp. A torch that was built without distributed
// has neither, nor anything to wait for; tests/parallel/test_late_collectives.py sees that others
// have.
namespace c10d {
[[gnu::weak]] std::size_t get_work_registry_size();
[[gnu::weak]] at::Tensor wait_tensor(const at::Tensor& tensor);
}  // namespace c10d

namespace memswap {

void wait_for_collectives(const at::TensorBase& tensor) {
  if (c10d::get_work_registry_size == nullptr || c10d::get_work_registry_size() == 0) {
    return;
  }
  const WithoutGil without_gil;  // a backend that is written in Python needs it to get done
  c10d::wait_tensor(at::Tensor(tensor));
}

}  // namespace memswap
