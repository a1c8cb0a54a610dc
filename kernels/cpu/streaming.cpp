#include "streaming.h"

#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <memory>
#include <string>

namespace memswap::cpu {

namespace {

struct Close {
  void operator()(FILE* file) const { fclose(file); }
};

// The first line of a file, without its end; empty where there is none.
std::string read_line(const std::string& path) {
  const std::unique_ptr<FILE, Close> file(fopen(path.c_str(), "r"));
  char line[64] = "";
  if (file == nullptr || fgets(line, sizeof(line), file.get()) == nullptr) {
    return "";
  }
  const std::string text = line;
  return text.substr(0, text.find('\n'));
}

// "32768K" or "32M" as bytes.
uint64_t bytes_of(const std::string& size) {
  char* end = nullptr;
  const uint64_t number = strtoull(size.c_str(), &end, 10);
  return number << (*end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0);
}

}  // namespace

uint64_t last_cache_bytes(const char* folder) {
  uint64_t last_level = 0;
  uint64_t bytes = 0;
  for (int i = 0;; ++i) {
    const std::string cache = std::string(folder) + "/index" + std::to_string(i);
    const std::string level = read_line(cache + "/level");
    if (level.empty()) {
      return bytes;
    }
    if (const uint64_t number = strtoull(level.c_str(), nullptr, 10);
        number >= last_level && read_line(cache + "/type") != "Instruction") {
      last_level = number;
      bytes = bytes_of(read_line(cache + "/size"));
    }
  }
}

uint64_t streaming_bytes_for(uint64_t cache_bytes) {
  return cache_bytes == 0
             ? kUsualStreamingBytes
             : std::clamp(cache_bytes / kCacheShare, kLeastStreamingBytes, kMostStreamingBytes);
}

uint64_t streaming_bytes() {
  static const uint64_t bytes =
      streaming_bytes_for(last_cache_bytes("/sys/devices/system/cpu/cpu0/cache"));
  return bytes;
}

}  // namespace memswap::cpu
