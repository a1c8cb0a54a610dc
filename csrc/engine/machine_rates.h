// How fast a machine copies, encodes and decodes.
#pragma once

#include <cstdint>

namespace memswap {

// Bytes per second of raw bytes; 0 where a device cannot do it. memswap.Rates says what each is.
struct MachineRates {
  double d2h_bytes_per_s = 0;
  double h2d_bytes_per_s = 0;
  double duplex_d2h_bytes_per_s = 0;
  double duplex_h2d_bytes_per_s = 0;
  double encode_bytes_per_s = 0;
  double decode_bytes_per_s = 0;
  double copy_latency_s = 0;
  double codec_latency_s = 0;
  double copy_share = 0;  // seconds of compute that each second of copying takes
  bool inline_codec = false;

  double send_s(int64_t nbytes) const {
    return copy_latency_s + static_cast<double>(nbytes) / d2h_bytes_per_s;
  }
  double fetch_s(int64_t nbytes) const {
    return copy_latency_s + static_cast<double>(nbytes) / h2d_bytes_per_s;
  }
  double encode_s(int64_t nbytes) const {
    return codec_latency_s + static_cast<double>(nbytes) / encode_bytes_per_s;
  }
  double decode_s(int64_t nbytes) const {
    return codec_latency_s + static_cast<double>(nbytes) / decode_bytes_per_s;
  }
};

}  // namespace memswap
