// Memory that is asked for before it is read or written.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace memswap::cpu {

inline constexpr uint32_t kLineBytes = 64;  // of a cache
inline constexpr uintptr_t kPageBytes = 4096;

// Asks for a line that is soon needed; an address outside of all memory does no harm.
[[gnu::always_inline]] inline void prefetch(const void* from, uintptr_t ahead) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + ahead));
  asm volatile("");  // GCC removes loops that do nothing but prefetch
}

// [Note: asking ahead]
// Who reads much asks for it before the processor's own prefetchers do. What to ask for is the
// processor's own, but for tensors that stay in the caches: those are asked for in a row.
//
// AMD's Zen 5 wants what stands some KiB ahead: with AVX-512 at 64 MiB, 2 KiB encode bfloat16 at
// 0.7 to 0.9 of what 8 or 12 KiB give. On Intel's (with AMX) 8 KiB are 0.85 of what 2 KiB give.
//
// That Intel's reads large memory in a row equally slowly, whatever the distance: its prefetchers
// follow each page by itself, and one page does not keep memory busy. Asked for lines of four pages
// in turns it reads faster (of two pages less so; eight are no better than four). So there, whoever
// reads the first part of four pages asks for the first lines of the next four, and so on.
inline constexpr uint32_t kNearBytes = 2048;
inline constexpr uintptr_t kPagesAtOnce = 4;
inline constexpr uint32_t kAskingBytes = kPagesAtOnce * kLineBytes;  // for each, a line of a page

// While the part of kAskingBytes at `from` is read, or one that begins in it.
[[gnu::always_inline]] inline void ask_pages(uintptr_t from) {
  constexpr uintptr_t kGroupBytes = kPagesAtOnce * kPageBytes;
  const uintptr_t next = from / kGroupBytes * kGroupBytes + kGroupBytes;
  const uintptr_t line = next + from % kGroupBytes / kAskingBytes * kLineBytes;
  for (uintptr_t page = 0; page < kPagesAtOnce; ++page) {
    prefetch(nullptr, line + page * kPageBytes);
  }
}

// While `bytes` bytes are read, and then what stands behind them: asks for each part once.
[[gnu::always_inline]] inline void ask_pages(const uint8_t* from, uint32_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(from);
  uintptr_t part = (begin + kAskingBytes - 1) / kAskingBytes * kAskingBytes;
  for (; part < begin + bytes; part += kAskingBytes) {
    ask_pages(part);
  }
}

// For lines that stand `ahead` bytes on.
[[gnu::always_inline]] inline void ask_lines(const uint8_t* from, uint32_t bytes, uint32_t ahead) {
  for (uint32_t i = 0; i < bytes; i += kLineBytes) {
    prefetch(from + i, ahead);
  }
}

// [Note: pages ahead]
// A store around the caches waits until its page's address is translated, and what is behind it
// waits, too; no prefetcher of the processor looks beyond a page. Asking for one line of a page
// that is written a little later has its address translated by then. The line's own traffic is next
// to nothing, and an address outside of all memory does no harm.
//
// Whether that pays is the processor's own. AMD's decode 64 MiB up to 1.6 times as fast by it. On
// Intel's (with AMX) it costs: without it decodes with AVX-512 are up to 1.19 times as fast, 1.08
// times in the median of 22 kinds of tensors (docs/benchmarks.md). Asking nearer by, for a page's
// last line, or by prefetchw or prefetchnta was no better than this.
inline constexpr uintptr_t kTouchBytes = 4 * kPageBytes;  // how far ahead. Measured

// Before `bytes` bytes are written at `to`, where others follow.
inline void touch_pages_ahead(const void* to, size_t bytes) {
  const auto from = reinterpret_cast<uintptr_t>(to);
  for (uintptr_t page = (from + kPageBytes - 1) / kPageBytes * kPageBytes; page < from + bytes;
       page += kPageBytes) {
    prefetch(nullptr, page + kTouchBytes);
  }
}

}  // namespace memswap::cpu
