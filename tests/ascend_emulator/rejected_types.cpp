// Calls that must not compile. A mark names a message that the statement below it must bring; the
// test compiles this file and compares.
#include "kernel_operator.h"

using namespace AscendC;  // NOLINT: kernel code is written so

template <class T>
LocalTensor<T> tensor() {
  return {};
}

void rejected() {
  uint64_t kept = 0;
  const GatherMaskParams whole(1, 1, 8, 0);
  // REJECT And takes int16_t or uint16_t
  And(tensor<int32_t>(), tensor<int32_t>(), tensor<int32_t>(), 8);
  // REJECT Or takes int16_t or uint16_t
  Or(tensor<uint32_t>(), tensor<uint32_t>(), tensor<uint32_t>(), 8);
  // REJECT Not takes int16_t or uint16_t
  Not(tensor<int32_t>(), tensor<int32_t>(), 8);
  // REJECT Add takes int16_t, half
  Add(tensor<uint16_t>(), tensor<uint16_t>(), tensor<uint16_t>(), 8);
  // REJECT Max takes int16_t, half
  Max(tensor<uint16_t>(), tensor<uint16_t>(), tensor<uint16_t>(), 8);
  // REJECT Adds takes int16_t, half
  Adds(tensor<uint32_t>(), tensor<uint32_t>(), 1u, 8);
  // REJECT Div takes half or float
  Div(tensor<int32_t>(), tensor<int32_t>(), tensor<int32_t>(), 8);
  // REJECT ShiftLeft takes int16_t
  ShiftLeft(tensor<uint8_t>(), tensor<uint8_t>(), (uint8_t)1, 8);
  // REJECT Duplicate takes 16- and 32-bit
  Duplicate(tensor<uint8_t>(), (uint8_t)1, 8);
  // REJECT CreateVecIndex takes int16_t
  CreateVecIndex(tensor<uint16_t>(), (uint16_t)0, 8u);
  // REJECT Compare takes half, float or int32_t
  Compare(tensor<uint8_t>(), tensor<int16_t>(), tensor<int16_t>(), CMPMODE::EQ, 128);
  // REJECT Select takes half or float
  Select(tensor<int32_t>(), tensor<uint8_t>(), tensor<int32_t>(), 0,
         SELMODE::VSEL_TENSOR_SCALAR_MODE, 64);
  // REJECT GatherMask takes 16- and 32-bit
  GatherMask(tensor<uint8_t>(), tensor<uint8_t>(), (uint8_t)1, false, 0, whole, kept);
  // REJECT 16-bit data with a uint16_t pattern
  GatherMask(tensor<half>(), tensor<half>(), tensor<uint32_t>(), false, 0, whole, kept);
  // REJECT Gather takes 16- and 32-bit
  Gather(tensor<uint8_t>(), tensor<uint8_t>(), tensor<uint32_t>(), 0, 8);
  // REJECT WholeReduceMax takes half or float
  WholeReduceMax(tensor<int32_t>(), tensor<int32_t>(), 64, 1, 1, 1, 8);
  // REJECT WholeReduceSum takes half or float
  WholeReduceSum(tensor<int16_t>(), tensor<int16_t>(), 64, 1, 1, 1, 8);
  // REJECT Cast has no such pair
  Cast(tensor<int16_t>(), tensor<uint8_t>(), RoundMode::CAST_NONE, 8);
  // REJECT Cast has no such pair
  Cast(tensor<int32_t>(), tensor<uint16_t>(), RoundMode::CAST_NONE, 8);
  // REJECT Transpose takes 16-bit
  Transpose(tensor<int32_t>(), tensor<int32_t>());
  // REJECT SetAtomicAdd takes
  SetAtomicAdd<uint32_t>();
  // REJECT SetAtomicMax takes
  SetAtomicMax<uint32_t>();
  // REJECT no matching function
  Adds(tensor<int16_t>(), tensor<int16_t>(), 1, 8);
  // REJECT no matching function
  ShiftRight(tensor<uint16_t>(), tensor<uint16_t>(), tensor<uint16_t>(), 8);
  // REJECT 'Xor' was not declared
  Xor(tensor<uint16_t>(), tensor<uint16_t>(), tensor<uint16_t>(), 8);
  // REJECT 'Scatter' was not declared
  Scatter(tensor<uint16_t>(), tensor<uint16_t>(), tensor<uint32_t>(), 0, 8);
  // REJECT 'SyncAll' was not declared
  SyncAll();
  // REJECT there is no PipeBarrier<PIPE_S>
  PipeBarrier<PIPE_S>();
  // REJECT a vector core has the pipes
  SetFlag<HardEvent::M_V>(0);
  // REJECT queues stand at VECIN or VECOUT
  TQue<TPosition::A1, 1> cube;
  // END
  (void)cube;
}
