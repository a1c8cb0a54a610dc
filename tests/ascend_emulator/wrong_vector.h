// Kernels that break the rules of vector instructions and of order between pipes.
#pragma once

#include "wrong_kernels.h"

namespace wrong_kernels {

inline std::vector<WrongKernel> vector_rules() {
  return {
      {"an operand off the 32-byte grid", "alignment", "src0 at UB address 2, expected a multiple",
       1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         Not(s.y, s.x[1], 128);
       }},
      {"a GM address off its type", "alignment", "GM address", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s(false);
         DataCopy(s.x, global<uint16_t>(in + 1, 64), 16);
       }},
      {"a mask of more lanes than there are", "mask", "found 129 lanes, expected at most 128", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         And(s.x, s.x, s.y, 129, 1, BinaryRepeatParams(1, 1, 1, 8, 8, 8));
       }},
      {"bits of a mask beyond 32-bit lanes", "mask", "bits beyond lane 64", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         SetVectorMask<int32_t>(1, 0);
       }},
      {"relies on the mask after GatherMask", "mask", "after GatherMask", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         uint64_t kept = 0;
         GatherMask(s.y, s.x, (uint8_t)1, false, 0, GatherMaskParams(1, 1, 8, 0), kept);
         PipeBarrier<PIPE_V>();
         And<uint16_t, false>(s.x, s.x, s.z, 0, 1, BinaryRepeatParams(1, 1, 1, 8, 8, 8));
       }},
      {"repeats more than 255 times", "repeat", "found 256, expected at most 255", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         And(s.x, s.x, s.y, 128, 256, BinaryRepeatParams(1, 1, 1, 8, 8, 8));
       }},
      {"a repeat stride beyond 8 bits", "repeat", "found 300, expected at most 255", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         And(s.x, s.x, s.y, 128, 1, BinaryRepeatParams(1, 1, 1, 300, 8, 8));
       }},
      {"a destination stride of 0", "stride", "dst has a block stride of 0", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         And(s.x, s.x, s.y, 128, 1, BinaryRepeatParams(0, 1, 1, 8, 8, 8));
       }},
      {"strides of a single repeat", "stride", "which the device adds even then", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         LocalTensor<uint16_t> from[16], to[16];
         for (uint32_t i = 0; i < 16; ++i) {
           from[i] = s.x[i * 16];
           to[i] = s.y[i * 16];
         }
         TransDataTo5HD<uint16_t>(to, from, TransDataTo5HDParams(false, false, 1, 16, 16));
       }},
      {"source and destination overlap within a repeat", "overlap", "dst of repeat 0 overwrites", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         Not(s.x[16], s.x, 128);
       }},
      {"a repeat overwrites what the next one reads", "overlap", "of this or a later repeat", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         Not(s.x[128], s.x, 256);
       }},
      {"gathers in place", "overlap", "Gather<uint16_t>: dst and src overlap", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         Duplicate(s.y.ReinterpretCast<uint32_t>(), (uint32_t)0, 256);
         PipeBarrier<PIPE_V>();
         Gather(s.x, s.x, s.y.ReinterpretCast<uint32_t>(), 0, 16);
       }},
      {"gathers behind the source", "gather", "offset 8192 of lane 0, the source has 8192", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         Duplicate(s.y.ReinterpretCast<uint32_t>(), (uint32_t)8192, 256);
         PipeBarrier<PIPE_V>();
         Gather(s.z, s.x, s.y.ReinterpretCast<uint32_t>(), 0, 16);
       }},
      {"gathers from within an element", "gather", "expected a multiple of 2", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         Duplicate(s.y.ReinterpretCast<uint32_t>(), (uint32_t)1, 256);
         PipeBarrier<PIPE_V>();
         Gather(s.z, s.x, s.y.ReinterpretCast<uint32_t>(), 0, 16);
       }},
      {"an unknown fixed pattern", "gather", "pattern 8, expected 1 to 7", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         uint64_t kept = 0;
         GatherMask(s.y, s.x, (uint8_t)8, false, 0, GatherMaskParams(1, 1, 8, 0), kept);
       }},
      {"shifts by more than the width", "shift", "by 17 bits, expected 0 to 16", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         ShiftRight(s.x, s.x, (uint16_t)17, 128);
       }},
      {"shifts a signed type left", "shift", "expected an unsigned view", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         const auto x = s.x.ReinterpretCast<int16_t>();
         ShiftLeft(x, x, (int16_t)1, 128);
       }},
      {"compares part of a repeat", "compare", "200 bytes, expected a multiple of 256", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         CompareScalar(s.y.ReinterpretCast<uint8_t>(), s.x.ReinterpretCast<half>(), half(1.0f),
                       CMPMODE::GT, 100);
       }},
      {"compares integers by order", "types", "expected EQ only", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         CompareScalar(s.y.ReinterpretCast<uint8_t>(), s.x.ReinterpretCast<int32_t>(), 1,
                       CMPMODE::GT, 64);
       }},
      {"selects a scalar in the mode of tensors", "select", "expected VSEL_TENSOR_SCALAR_MODE", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         const auto x = s.x.ReinterpretCast<half>();
         Select(x, s.y.ReinterpretCast<uint8_t>(), x, half(0.0f), SELMODE::VSEL_TENSOR_TENSOR_MODE,
                128);
       }},
      {"casts without a rounding where one is needed", "cast", "expected a rounding", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         Cast(s.y.ReinterpretCast<int16_t>(), s.x.ReinterpretCast<half>(), RoundMode::CAST_NONE,
              128);
       }},
      {"reduces to an index", "reduce", "expected ORDER_ONLY_VALUE", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         WholeReduceMax(s.y.ReinterpretCast<half>(), s.x.ReinterpretCast<half>(), 128, 1, 1, 1, 8);
       }},
      {"copies part of a block", "copy", "use DataCopyPad", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s(false);
         DataCopy(s.x, global<uint16_t>(in), 17);
       }},
      {"copies nothing with padding", "copy", "blockLen 0 bytes", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s(false);
         DataCopyPad(s.x, global<uint16_t>(in), DataCopyExtParams(1, 0, 0, 0, 0),
                     DataCopyPadExtParams<uint16_t>());
       }},
      {"copies too many pieces", "copy", "blockCount 4096, expected 1 to 4095", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s(false);
         DataCopyPad(s.x, global<uint16_t>(in), DataCopyExtParams(4096, 2, 0, 0, 0),
                     DataCopyPadExtParams<uint16_t>());
       }},
      {"relies on the padding value", "copy", "must not be relied on", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s(false);
         DataCopyPad(s.x, global<uint16_t>(in), DataCopyExtParams(1, 10, 0, 0, 0),
                     DataCopyPadExtParams<uint16_t>(true, 0, 11, 0));
       }},
      {"stops itself", "trap", "Trap", 1, [](GM_ADDR, GM_ADDR) { Trap(); }},
  };
}

inline std::vector<WrongKernel> order_rules() {
  return {
      {"V reads what V wrote, without a barrier", "hazard", "missing PipeBarrier<PIPE_V>", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         Not(s.y, s.x, 128);
         Not(s.z, s.y, 128);
       }},
      {"V overwrites what V reads, without a barrier", "hazard", "overwrites what was read", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         Not(s.y, s.x, 128);
         Not(s.x, s.z, 128);
       }},
      {"V reads what MTE2 is loading", "hazard", "missing SetFlag/WaitFlag<MTE2_V>", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s(false);
         DataCopy(s.x, global<uint16_t>(in), 128);
         Not(s.y, s.x, 128);
       }},
      {"MTE3 stores what V is computing", "hazard", "missing SetFlag/WaitFlag<V_MTE3>", 1,
       [](GM_ADDR, GM_ADDR out) {
         Scratch s;
         DataCopy(global<uint16_t>(out), s.x, 128);
       }},
      {"V overwrites what MTE3 is storing", "hazard", "missing SetFlag/WaitFlag<MTE3_V>", 1,
       [](GM_ADDR, GM_ADDR out) {
         Scratch s;
         hand_over<HardEvent::V_MTE3>();
         DataCopy(global<uint16_t>(out), s.x, 128);
         Duplicate(s.x, (uint16_t)9, 128);
       }},
      {"MTE2 overwrites what V reads", "hazard", "missing SetFlag/WaitFlag<V_MTE2>", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s;
         DataCopy(s.x, global<uint16_t>(in), 128);
       }},
      {"the scalar unit reads what V is computing", "hazard", "missing SetFlag/WaitFlag<V_S>", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         s.x.GetValue(0);
       }},
      {"V reads what the scalar unit stored", "hazard", "missing SetFlag/WaitFlag<S_V>", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s(false);
         s.x.SetValue(0, 1);
         Not(s.y, s.x, 1);
       }},
      {"MTE2 overwrites what the scalar unit read", "hazard", "missing SetFlag/WaitFlag<S_MTE2>", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s(false);
         DataCopy(s.x, global<uint16_t>(in), 128);
         hand_over<HardEvent::MTE2_S>();
         s.x.GetValue(0);
         PipeBarrier<PIPE_MTE2>();
         DataCopy(s.x, global<uint16_t>(in), 128);
       }},
      {"the scalar unit reads a dequeued tensor without a flag of its own", "hazard",
       "missing SetFlag/WaitFlag<MTE2_S>", 1,
       [](GM_ADDR in, GM_ADDR) {
         TPipe pipe;
         TQue<TPosition::VECIN, 1> queue;
         pipe.InitBuffer(queue, 1, 256);
         auto tensor = queue.AllocTensor<uint16_t>();
         DataCopy(tensor, global<uint16_t>(in), 128);
         queue.EnQue(tensor);
         tensor = queue.DeQue<uint16_t>();
         tensor.GetValue(0);
         queue.FreeTensor(tensor);
       }},
      {"two loads into the same place", "hazard", "missing PipeBarrier<PIPE_MTE2>", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s(false);
         DataCopy(s.x, global<uint16_t>(in), 128);
         DataCopy(s.x, global<uint16_t>(in), 128);
       }},
      {"two stores into the same place", "hazard", "missing PipeBarrier<PIPE_MTE3>", 1,
       [](GM_ADDR, GM_ADDR out) {
         Scratch s;
         hand_over<HardEvent::V_MTE3>();
         DataCopy(global<uint16_t>(out), s.x, 128);
         DataCopy(global<uint16_t>(out), s.y, 128);
       }},
      {"loads what the same core is storing", "hazard", "missing SetFlag/WaitFlag<MTE3_MTE2>", 1,
       [](GM_ADDR, GM_ADDR out) {
         Scratch s;
         hand_over<HardEvent::V_MTE3>();
         hand_over<HardEvent::V_MTE2>();
         DataCopy(global<uint16_t>(out), s.x, 128);
         DataCopy(s.y, global<uint16_t>(out), 128);
       }},
  };
}

}  // namespace wrong_kernels
