// Kernels that keep all rules; their results are known.
#pragma once

#include <vector>

#include "kernel_operator.h"

namespace right_kernels {

using namespace AscendC;  // NOLINT: kernel code is written so

constexpr uint32_t kTile = 2048;  // elements

// z = x + y, with double buffering and a tail that is no multiple of 32 bytes.
inline void add(GM_ADDR x, GM_ADDR y, GM_ADDR z, uint32_t elements) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TQue<TPosition::VECIN, 1> other;
  TQue<TPosition::VECOUT, 1> out;
  pipe.InitBuffer(in, 2, kTile * 4);
  pipe.InitBuffer(other, 2, kTile * 4);
  pipe.InitBuffer(out, 2, kTile * 4);
  GlobalTensor<int32_t> gx, gy, gz;
  gx.SetGlobalBuffer(reinterpret_cast<int32_t*>(x), elements);
  gy.SetGlobalBuffer(reinterpret_cast<int32_t*>(y), elements);
  gz.SetGlobalBuffer(reinterpret_cast<int32_t*>(z), elements);
  for (uint32_t at = static_cast<uint32_t>(GetBlockIdx()) * kTile; at < elements;
       at += static_cast<uint32_t>(GetBlockNum()) * kTile) {
    const uint32_t count = std::min(kTile, elements - at);
    const DataCopyExtParams copy(1, count * 4, 0, 0, 0);
    LocalTensor<int32_t> a = in.AllocTensor<int32_t>();
    LocalTensor<int32_t> b = other.AllocTensor<int32_t>();
    DataCopyPad(a, gx[at], copy, DataCopyPadExtParams<int32_t>());
    DataCopyPad(b, gy[at], copy, DataCopyPadExtParams<int32_t>());
    in.EnQue(a);
    other.EnQue(b);
    a = in.DeQue<int32_t>();
    b = other.DeQue<int32_t>();
    LocalTensor<int32_t> c = out.AllocTensor<int32_t>();
    Add(c, a, b, static_cast<int32_t>(count));
    out.EnQue(c);
    in.FreeTensor(a);
    other.FreeTensor(b);
    c = out.DeQue<int32_t>();
    DataCopyPad(gz[at], c, copy);
    out.FreeTensor(c);
  }
}

// Per tile: the number of even halves above zero, a zero, and from 16 on these halves, in order.
// `broken` leaves out an edge, for the test that shows what deferred execution makes of it.
inline void keep_positive(GM_ADDR x, GM_ADDR y, uint32_t tiles, bool broken) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TQue<TPosition::VECOUT, 1> out;
  TBuf<TPosition::VECCALC> bits, evens;
  pipe.InitBuffer(in, 2, kTile * 2);
  pipe.InitBuffer(out, 2, kTile * 2);
  pipe.InitBuffer(bits, kTile / 8);
  pipe.InitBuffer(evens, kTile * 2);
  GlobalTensor<half> gx, gy;
  gx.SetGlobalBuffer(reinterpret_cast<half*>(x), uint64_t{tiles} * kTile);
  gy.SetGlobalBuffer(reinterpret_cast<half*>(y), uint64_t{tiles} * kTile);
  for (uint32_t tile = static_cast<uint32_t>(GetBlockIdx()); tile < tiles;
       tile += static_cast<uint32_t>(GetBlockNum())) {
    LocalTensor<half> a = in.AllocTensor<half>();
    DataCopy(a, gx[uint64_t{tile} * kTile], kTile);
    in.EnQue(a);
    a = in.DeQue<half>();
    LocalTensor<half> c = out.AllocTensor<half>();
    LocalTensor<half> even = evens.Get<half>();
    LocalTensor<uint8_t> positive = bits.Get<uint8_t>();
    PipeBarrier<PIPE_V>();
    uint64_t kept = 0;
    GatherMask(even, a, (uint8_t)1, true, kTile, GatherMaskParams(1, 1, 0, 0), kept);
    PipeBarrier<PIPE_V>();
    in.FreeTensor(a);
    CompareScalar(positive, even, half(0.0f), CMPMODE::GT, kTile / 2);
    Duplicate(c, half(0.0f), kTile);
    PipeBarrier<PIPE_V>();
    GatherMask(c[16], even, positive.ReinterpretCast<uint16_t>(), true, kTile / 2,
               GatherMaskParams(1, 1, 0, 0), kept);
    const uint32_t end = 16 + static_cast<uint32_t>(kept);
    PipeBarrier<PIPE_V>();
    // What GatherMask leaves behind the survivors is undefined.
    const uint32_t aligned = end / 128 * 128;
    uint64_t tail[2] = {~uint64_t{0}, ~uint64_t{0}};
    if (end - aligned >= 64) {
      tail[0] = 0;
      tail[1] = ~uint64_t{0} << (end - aligned - 64);
    } else {
      tail[0] = ~uint64_t{0} << (end - aligned);
    }
    Duplicate(c[aligned], half(0.0f), tail, 1, 1, 8);
    if (aligned + 128 < kTile) {
      Duplicate(c[aligned + 128], half(0.0f), static_cast<int32_t>(kTile - aligned - 128));
    }
    if (!broken) {
      SetFlag<HardEvent::V_S>(0);
      WaitFlag<HardEvent::V_S>(0);
    }
    c.SetValue(0, half(static_cast<float>(kept)));
    c.SetValue(1, c.GetValue(end));
    SetFlag<HardEvent::S_MTE3>(0);
    WaitFlag<HardEvent::S_MTE3>(0);
    out.EnQue(c);
    c = out.DeQue<half>();
    DataCopy(gy[uint64_t{tile} * kTile], c, kTile);
    out.FreeTensor(c);
  }
}

// Where x > y, x, else 0.5; then as bytes; with the greatest of each 128 in front, broadcast.
inline void clamp_to_bytes(GM_ADDR x, GM_ADDR y, GM_ADDR z, GM_ADDR sums, uint32_t tiles) {
  constexpr uint32_t kCount = 1024;
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TQue<TPosition::VECOUT, 1> out, total;
  TBuf<TPosition::VECCALC> bits, maxima, spread;
  pipe.InitBuffer(in, 2, kCount * 4);
  pipe.InitBuffer(out, 2, kCount);
  pipe.InitBuffer(total, 2, 32);
  pipe.InitBuffer(bits, kCount / 8);
  pipe.InitBuffer(maxima, 32);
  pipe.InitBuffer(spread, 256);
  GlobalTensor<half> gx, gy;
  GlobalTensor<uint8_t> gz;
  GlobalTensor<int32_t> gs;
  gx.SetGlobalBuffer(reinterpret_cast<half*>(x), uint64_t{tiles} * kCount);
  gy.SetGlobalBuffer(reinterpret_cast<half*>(y), uint64_t{tiles} * kCount);
  gz.SetGlobalBuffer(z, uint64_t{tiles} * kCount);
  gs.SetGlobalBuffer(reinterpret_cast<int32_t*>(sums), 8);
  LocalTensor<half> top = maxima.Get<half>();
  LocalTensor<half> wide = spread.Get<half>();
  LocalTensor<uint8_t> greater = bits.Get<uint8_t>();
  for (uint32_t tile = static_cast<uint32_t>(GetBlockIdx()); tile < tiles;
       tile += static_cast<uint32_t>(GetBlockNum())) {
    LocalTensor<half> a = in.AllocTensor<half>();
    DataCopy(a, gx[uint64_t{tile} * kCount], kCount);
    DataCopy(a[kCount], gy[uint64_t{tile} * kCount], kCount);
    in.EnQue(a);
    a = in.DeQue<half>();
    LocalTensor<uint8_t> c = out.AllocTensor<uint8_t>();
    PipeBarrier<PIPE_V>();
    Compare(greater, a, a[kCount], CMPMODE::GT, kCount);
    PipeBarrier<PIPE_V>();
    Select(a, greater, a, half(0.5f), SELMODE::VSEL_TENSOR_SCALAR_MODE, kCount);
    PipeBarrier<PIPE_V>();
    WholeReduceMax(top, a, 128, 8, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
    PipeBarrier<PIPE_V>();
    Brcb(wide, top, 1, BrcbRepeatParams(1, 8));
    PipeBarrier<PIPE_V>();
    for (uint32_t group = 0; group < 8; ++group) {
      // One block of the broadcast serves all blocks of the repeat.
      Sub(a[group * 128], wide[group * 16], a[group * 128], 128, 1,
          BinaryRepeatParams(1, 0, 1, 8, 8, 8));
    }
    PipeBarrier<PIPE_V>();
    Cast(c, a, RoundMode::CAST_RINT, kCount);
    LocalTensor<int32_t> one = total.AllocTensor<int32_t>();
    Duplicate(one, 1, 8);
    out.EnQue(c);
    total.EnQue(one);
    in.FreeTensor(a);
    c = out.DeQue<uint8_t>();
    DataCopy(gz[uint64_t{tile} * kCount], c, kCount);
    out.FreeTensor(c);
    one = total.DeQue<int32_t>();
    SetAtomicAdd<int32_t>();
    DataCopy(gs, one, 8);
    SetAtomicNone();
    total.FreeTensor(one);
  }
}

// Every 16 x 16 elements transposed, then looked up in reverse order.
inline void transpose_and_reverse(GM_ADDR x, GM_ADDR y, uint32_t tiles) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TQue<TPosition::VECOUT, 1> out;
  TBuf<TPosition::VECCALC> offsets, turned;
  pipe.InitBuffer(in, 2, 512);
  pipe.InitBuffer(out, 2, 512);
  pipe.InitBuffer(offsets, 1024);
  pipe.InitBuffer(turned, 512);
  GlobalTensor<uint16_t> gx, gy;
  gx.SetGlobalBuffer(reinterpret_cast<uint16_t*>(x), uint64_t{tiles} * 256);
  gy.SetGlobalBuffer(reinterpret_cast<uint16_t*>(y), uint64_t{tiles} * 256);
  LocalTensor<int32_t> index = offsets.Get<int32_t>();
  LocalTensor<uint16_t> middle = turned.Get<uint16_t>();
  CreateVecIndex(index, 0, 256);
  PipeBarrier<PIPE_V>();
  Muls(index, index, -2, 256);
  PipeBarrier<PIPE_V>();
  Adds(index, index, 510, 256);
  for (uint32_t tile = static_cast<uint32_t>(GetBlockIdx()); tile < tiles;
       tile += static_cast<uint32_t>(GetBlockNum())) {
    LocalTensor<uint16_t> a = in.AllocTensor<uint16_t>();
    DataCopy(a, gx[uint64_t{tile} * 256], 256);
    in.EnQue(a);
    a = in.DeQue<uint16_t>();
    LocalTensor<uint16_t> c = out.AllocTensor<uint16_t>();
    PipeBarrier<PIPE_V>();
    LocalTensor<uint16_t> rows[16], columns[16];
    for (uint32_t i = 0; i < 16; ++i) {
      rows[i] = a[i * 16];
      columns[i] = middle[i * 16];
    }
    TransDataTo5HD<uint16_t>(columns, rows, TransDataTo5HDParams(false, false, 1, 0, 0));
    PipeBarrier<PIPE_V>();
    Gather(c, middle, index.ReinterpretCast<uint32_t>(), 0, 256);
    in.FreeTensor(a);
    out.EnQue(c);
    c = out.DeQue<uint16_t>();
    DataCopy(gy[uint64_t{tile} * 256], c, 256);
    out.FreeTensor(c);
  }
}

}  // namespace right_kernels
