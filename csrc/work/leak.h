// What a forked child must not let go of.
#pragma once

#include <type_traits>
#include <utility>

namespace memswap {

// Keeps what a forked child shares with its parent for ever. Letting go of it would call a driver,
// take a lock that nobody lets go of, or return what the parent uses. Of a thread above all: the
// child does not have it, and the C library gives its memory, and with it its name, to the next one
// that the child starts. To detach it would detach that one.
template <class Shared>
void leak(Shared&& shared) {
  new std::remove_reference_t<Shared>(std::forward<Shared>(shared));  // NOLINT: leaked on purpose
}

}  // namespace memswap
