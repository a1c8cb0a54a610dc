// Moves between GM and UB, and atomic addition and maximum on the way out.
#pragma once

#include "elementwise.h"

namespace AscendC {

struct DataCopyParams {
  DataCopyParams() = default;
  DataCopyParams(ascend_emulator::Limited<uint16_t> count,
                 ascend_emulator::Limited<uint16_t> length,
                 ascend_emulator::Limited<uint16_t> source_gap,
                 ascend_emulator::Limited<uint16_t> target_gap)
      : blockCount(count), blockLen(length), srcStride(source_gap), dstStride(target_gap) {}
  uint16_t blockCount = 1;
  uint16_t blockLen = 0;  // in blocks of 32 bytes, like the gaps
  uint16_t srcStride = 0;
  uint16_t dstStride = 0;
};

struct DataCopyExtParams {
  DataCopyExtParams() = default;
  DataCopyExtParams(ascend_emulator::Limited<uint16_t> count,
                    ascend_emulator::Limited<uint32_t> length,
                    ascend_emulator::Limited<uint32_t> source_gap,
                    ascend_emulator::Limited<uint32_t> target_gap,
                    ascend_emulator::Limited<uint32_t> reserved)
      : blockCount(count),
        blockLen(length),
        srcStride(source_gap),
        dstStride(target_gap),
        rsv(reserved) {}
  uint16_t blockCount = 1;
  uint32_t blockLen = 0;  // bytes; gaps are bytes in GM and blocks of 32 bytes in UB
  uint32_t srcStride = 0;
  uint32_t dstStride = 0;
  uint32_t rsv = 0;
};

template <class T>
struct DataCopyPadExtParams {
  DataCopyPadExtParams() = default;
  DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, T value)
      : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
  bool isPad = false;
  uint8_t leftPadding = 0;
  uint8_t rightPadding = 0;
  T paddingValue{};
};

}  // namespace AscendC

namespace ascend_emulator {

inline constexpr uint32_t kMaxCopyBlocks = 4095;
inline constexpr uint32_t kMaxCopyBytes = 2097151;

struct Piece {
  uint64_t global;
  uint64_t unified;
  uint64_t bytes;
};

inline Access pieces_of(const std::vector<Piece>& pieces, Space space, bool write) {
  Access access{space, write, {}};
  for (const Piece& piece : pieces) {
    const uint64_t begin = space == Space::kGlobal ? piece.global : piece.unified;
    access.footprint.add_range(begin, begin + piece.bytes);
  }
  return access;
}

inline void load(const std::string& call, const std::vector<Piece>& pieces) {
  Core& here = core();
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) {
    here.global_memory.note_read(call, piece.global, piece.bytes, here.block);
    bytes += piece.bytes;
  }
  here.tally.longest_load = std::max(here.tally.longest_load, bytes);
  // A block is filled up to 32 bytes with something.
  Access writes{Space::kUnified, true, {}};
  for (const Piece& piece : pieces) {
    const uint64_t end =
        (piece.unified + piece.bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    writes.footprint.add_range(piece.unified, end);
  }
  here.issue(PIPE_MTE2, call, {pieces_of(pieces, Space::kGlobal, false), writes}, [pieces, &here] {
    for (const Piece& piece : pieces) {
      std::memcpy(here.ub(piece.unified), reinterpret_cast<const void*>(piece.global), piece.bytes);
      for (uint64_t i = piece.unified + piece.bytes; i % kBlockBytes != 0; ++i) {
        *here.ub(i) = static_cast<uint8_t>(0x6b + i);
      }
    }
  });
  for (const Piece& piece : pieces) {
    const uint64_t end = piece.unified + piece.bytes;
    here.set_initialized(end, (end + kBlockBytes - 1) / kBlockBytes * kBlockBytes, false);
  }
}

using Combine = void (*)(void* to, const void* from);
template <class T, Atomic kind>
void combine_bytes(void* to, const void* from) {
  T a;
  T b;
  std::memcpy(&a, to, sizeof(T));
  std::memcpy(&b, from, sizeof(T));
  if constexpr (kind == Atomic::kAdd) {
    a = wrapped(a, b, [](auto x, auto y) { return x + y; });
  } else {
    a = a < b ? b : a;
  }
  std::memcpy(to, &a, sizeof(T));
}

template <class T, Atomic kind>
void set_atomic() {
  Core& here = core();
  here.atomic = kind;
  here.combine = combine_bytes<T, kind>;
  here.atomic_element_bytes = sizeof(T);
  here.atomic_type = type_name<T>();
}

template <class T>
void store(const std::string& call, const std::vector<Piece>& pieces) {
  Core& here = core();
  const Combine combine = here.combine;
  const int element = here.atomic_element_bytes;
  if (combine != nullptr) {
    if (here.atomic_type != type_name<T>()) {
      violate("atomic", call, "after SetAtomic", here.atomic == Atomic::kAdd ? "Add<" : "Max<",
              here.atomic_type, ">");
    }
    for (const Piece& piece : pieces) {
      if (piece.bytes % static_cast<uint64_t>(element) != 0 ||
          piece.global % static_cast<uint64_t>(element) != 0) {
        violate("atomic", call, piece.bytes, " bytes, expected whole elements of ", element);
      }
    }
  }
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) {
    here.global_memory.note_write(call, piece.global, piece.bytes, here.block, here.atomic);
    bytes += piece.bytes;
  }
  here.tally.longest_store = std::max(here.tally.longest_store, bytes);
  Access writes = pieces_of(pieces, Space::kGlobal, true);
  writes.atomic = here.atomic;
  here.issue(PIPE_MTE3, call, {pieces_of(pieces, Space::kUnified, false), writes},
             [pieces, combine, element, &here] {
               for (const Piece& piece : pieces) {
                 uint8_t* to = reinterpret_cast<uint8_t*>(piece.global);
                 const uint8_t* from = here.ub(piece.unified);
                 if (combine == nullptr) {
                   std::memcpy(to, from, piece.bytes);
                   continue;
                 }
                 for (uint64_t i = 0; i < piece.bytes; i += static_cast<uint64_t>(element)) {
                   combine(to + i, from + i);
                 }
               }
             });
}

// `unit`: what blockLen counts; gaps in bytes.
template <class T>
std::vector<Piece> copy_pieces(const std::string& call, const AscendC::GlobalTensor<T>& global,
                               const AscendC::LocalTensor<T>& local, uint32_t blocks,
                               uint64_t block_bytes, uint64_t global_gap, uint64_t local_gap) {
  if (blocks == 0 || blocks > kMaxCopyBlocks) {
    violate("copy", call, "blockCount ", blocks, ", expected 1 to ", kMaxCopyBlocks);
  }
  std::vector<Piece> pieces;
  uint64_t from_global = 0;
  uint64_t from_local = 0;
  const uint64_t rounded = (block_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  for (uint32_t i = 0; i < blocks; ++i) {
    const uint64_t unified = local.use(call, from_local, rounded);
    need_alignment(call, "the UB operand", unified);
    pieces.push_back({global.use(call, from_global, block_bytes), unified, block_bytes});
    from_global += block_bytes + global_gap;
    from_local += rounded + local_gap;
  }
  return pieces;
}

inline void need_whole_blocks(const std::string& call, uint64_t bytes) {
  if (bytes == 0 || bytes % kBlockBytes != 0) {
    violate("copy", call, bytes, " bytes, expected a multiple of ", kBlockBytes,
            ": the device rounds down and drops the tail; use DataCopyPad");
  }
}

template <class T>
void need_pad_length(const std::string& call, uint64_t bytes) {
  if (bytes == 0 || bytes > kMaxCopyBytes || bytes % sizeof(T) != 0) {
    violate("copy", call, "blockLen ", bytes, " bytes, expected 1 to ", kMaxCopyBytes,
            " and a multiple of ", sizeof(T));
  }
}

}  // namespace ascend_emulator

namespace AscendC {

template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count) {
  const std::string call = ascend_emulator::call_name<T>("DataCopy GM to UB");
  ascend_emulator::need_whole_blocks(call, count * sizeof(T));
  ascend_emulator::load(call,
                        ascend_emulator::copy_pieces(call, src, dst, 1, count * sizeof(T), 0, 0));
}

template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count) {
  const std::string call = ascend_emulator::call_name<T>("DataCopy UB to GM");
  ascend_emulator::need_whole_blocks(call, count * sizeof(T));
  ascend_emulator::store<T>(
      call, ascend_emulator::copy_pieces(call, dst, src, 1, count * sizeof(T), 0, 0));
}

template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params) {
  const std::string call = ascend_emulator::call_name<T>("DataCopy GM to UB");
  ascend_emulator::need_whole_blocks(call, params.blockLen * 32u);
  ascend_emulator::load(
      call, ascend_emulator::copy_pieces(call, src, dst, params.blockCount, params.blockLen * 32u,
                                         params.srcStride * 32u, params.dstStride * 32u));
}

template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params) {
  const std::string call = ascend_emulator::call_name<T>("DataCopy UB to GM");
  ascend_emulator::need_whole_blocks(call, params.blockLen * 32u);
  ascend_emulator::store<T>(
      call, ascend_emulator::copy_pieces(call, dst, src, params.blockCount, params.blockLen * 32u,
                                         params.dstStride * 32u, params.srcStride * 32u));
}

// Within UB, by the vector unit.
template <class T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count) {
  const std::string call = ascend_emulator::call_name<T>("DataCopy UB to UB");
  ascend_emulator::need_whole_blocks(call, count * sizeof(T));
  const ascend_emulator::Access from = ascend_emulator::contiguous(call, "src", false, src, count);
  const ascend_emulator::Access to = ascend_emulator::contiguous(call, "dst", true, dst, count);
  ascend_emulator::need_disjoint(call, "dst and src", dst.GetPhyAddr(),
                                 dst.GetPhyAddr() + count * sizeof(T), src.GetPhyAddr(),
                                 src.GetPhyAddr() + count * sizeof(T));
  T* target = ascend_emulator::ub_pointer(dst);
  const T* source = ascend_emulator::ub_pointer(src);
  ascend_emulator::core().issue(PIPE_V, call, {from, to},
                                [=] { std::memcpy(target, source, count * sizeof(T)); });
}

template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                 const DataCopyExtParams& params, const DataCopyPadExtParams<T>& pad) {
  const std::string call = ascend_emulator::call_name<T>("DataCopyPad GM to UB");
  ascend_emulator::need_pad_length<T>(call, params.blockLen);
  if (pad.leftPadding != 0 || pad.rightPadding != 0 || pad.isPad) {
    ascend_emulator::violate("copy", call,
                             "asks for padding, which must not be relied on; fill the tail with "
                             "Duplicate");
  }
  ascend_emulator::load(
      call, ascend_emulator::copy_pieces(call, src, dst, params.blockCount, params.blockLen,
                                         params.srcStride, uint64_t{params.dstStride} * 32));
}

template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src,
                 const DataCopyExtParams& params) {
  const std::string call = ascend_emulator::call_name<T>("DataCopyPad UB to GM");
  ascend_emulator::need_pad_length<T>(call, params.blockLen);
  ascend_emulator::store<T>(
      call, ascend_emulator::copy_pieces(call, dst, src, params.blockCount, params.blockLen,
                                         params.dstStride, uint64_t{params.srcStride} * 32));
}

template <class T>
void SetAtomicAdd() {
  static_assert(table::atomic<T>,
                "rule types: SetAtomicAdd takes int8_t, int16_t, half, bfloat16_t, int32_t or "
                "float");
  ascend_emulator::set_atomic<T, ascend_emulator::Atomic::kAdd>();
}

template <class T>
void SetAtomicMax() {
  static_assert(table::atomic<T>,
                "rule types: SetAtomicMax takes int8_t, int16_t, half, bfloat16_t, int32_t or "
                "float");
  ascend_emulator::set_atomic<T, ascend_emulator::Atomic::kMax>();
}

inline void SetAtomicNone() {
  ascend_emulator::Core& core = ascend_emulator::core();
  core.atomic = ascend_emulator::Atomic::kNone;
  core.combine = nullptr;
}

}  // namespace AscendC
