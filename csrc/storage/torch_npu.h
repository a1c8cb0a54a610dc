// The few things that need torch_npu: its task queue, its raw streams, its storages' formats.
//
// Everything else reaches an NPU through torch's device-generic interfaces. torch_npu is found at
// run time, in the process that has imported it: nothing here is compiled or linked against it.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Stream.h>

#include <functional>

namespace memswap {

// [Note: torch_npu's task queue]
// With TASK_QUEUE_ENABLE=1, its default, torch_npu keeps operators, copies and events in a queue of
// the host and hands them to the driver from another thread. A kernel that went to the raw stream
// at once would overtake all that the host has issued before it, events to wait for included. So
// what memswap launches itself takes its place in that queue, like an operator of torch_npu's. (The
// other way, Stream::native_handle(), is correct as well: torch_npu first lets the queue run empty,
// and the host waits for that at each launch.)

// Runs `work` with the native handle of `stream`, in its place behind everything that the calling
// thread has submitted so far: at once, or on the thread of torch_npu's task queue. `work` enqueues
// on that handle, waits for nothing, and returns 0, or a code that says why nothing was enqueued.
// Returns that code where it is known already; a failure on the queue's thread is torch_npu's to
// tell, which it does at a later call. Throws where an earlier failure comes up now; `work` has not
// run then.
int submit(const char* name, c10::Stream stream, std::function<int(void* native_stream)> work);

// Whether the bytes of the tensor's storage lie in a format of the NPU's own (FRACTAL_NZ and the
// like), which neither sizes and strides nor the bytes tell.
bool has_private_format(const at::TensorBase& tensor);

}  // namespace memswap
