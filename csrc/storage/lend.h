// A storage whose memory comes and goes while it stays the same storage.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <string>

#include "storage.h"

namespace memswap {

// [Note: Lent memory]
// Weights that are gathered for a while live in a storage of their own, the shell, for as long as
// the model does: autograd saves views of it, and they must mean the same weights when backward
// comes, wherever those were gathered to by then. So not the views but the memory changes: lend()
// puts a slot's memory under the shell, take_back() takes it away, and in between any use of the
// shell raises instead of reading what another unit has in the slot by then.
//
// The shell owns the slot's storage while it is lent, so a slot that was dropped is freed only when
// nobody can read it any more. Nothing here waits: that the memory is in use no longer is what the
// order of the stream says on which all of its readers and the next writer are launched.

// Whether this torch lets a storage be used again whose use has raised. Not every supported one
// does.
bool can_lend();

// Puts `nbytes` of `memory`, from `offset`, under `shell`, which has none.
void lend(StorageRef& shell, const StorageRef& memory, size_t offset, size_t nbytes);

// Takes the memory away; using the shell then raises `message`. It keeps its size, so that views of
// it can still be made: what raises is reading and writing.
void take_back(StorageRef& shell, const std::string& message);

// Whether the storage has lent memory now.
bool is_lent(c10::StorageImpl& storage);
bool is_lent(const at::Tensor& tensor);

// Whether the storage has memory of its own, and so many bytes of it: it was neither lent nor taken
// away.
bool owns_memory(c10::StorageImpl& storage, size_t nbytes);

}  // namespace memswap
