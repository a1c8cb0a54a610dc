// Moves between GM and UB, of any number of bytes. UB is at a multiple of 32 bytes.
#pragma once

#include "lanes.h"

namespace memswap::ascend {

template <class T>
__aicore__ inline GlobalTensor<T> global_at(GM_ADDR address, uint64_t elements) {
  GlobalTensor<T> global;
  global.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address), elements);
  return global;
}

// What is behind the last byte in its block of 32 is undefined: padding is not to be relied on.
__aicore__ inline void load_bytes(const Bytes& to, GM_ADDR from, uint32_t bytes) {
  DataCopyPad(to, global_at<uint8_t>(from, bytes), DataCopyExtParams(1, bytes, 0, 0, 0),
              DataCopyPadExtParams<uint8_t>(false, 0, 0, 0));
}

__aicore__ inline void store_bytes(GM_ADDR to, const Bytes& from, uint32_t bytes) {
  DataCopyPad(global_at<uint8_t>(to, bytes), from, DataCopyExtParams(1, bytes, 0, 0, 0));
}

}  // namespace memswap::ascend
