// The completion of work on a stream of a device.
#pragma once

#include <c10/core/Stream.h>

#include "work/ticket.h"

namespace memswap {

// Other streams can come after such work without the host waiting for anything.
class StreamTicket : public Ticket {
 public:
  // What is submitted to `stream` from now on comes after the work. A stream of another kind of
  // device cannot wait for it: then the calling thread blocks.
  virtual void order_before(c10::Stream stream) = 0;
};

}  // namespace memswap
