// Kernels that break the rules of memory, buffers, queues and events.
#pragma once

#include "wrong_kernels.h"

namespace wrong_kernels {

inline std::vector<WrongKernel> memory_rules() {
  return {
      {"reads UB that nothing wrote", "uninitialized", "Add<int16_t>: reads UB byte 0", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s(false);
         const auto x = s.x.ReinterpretCast<int16_t>();
         Add(s.y.ReinterpretCast<int16_t>(), x, x, 128);
       }},
      {"reads the fill behind a padded copy", "uninitialized", "reads UB byte 10", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s(false);
         DataCopyPad(s.x, global<uint16_t>(in), DataCopyExtParams(1, 10, 0, 0, 0),
                     DataCopyPadExtParams<uint16_t>(false, 0, 0, 0));
         hand_over<HardEvent::MTE2_V>();
         Adds(s.y.ReinterpretCast<int16_t>(), s.x.ReinterpretCast<int16_t>(), (int16_t)1, 6);
       }},
      {"reads behind what GatherMask kept", "uninitialized", "reads UB byte 8258", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         uint64_t kept = 0;
         GatherMask(s.y, s.x, (uint8_t)1, true, 65, GatherMaskParams(1, 1, 0, 0), kept);
         PipeBarrier<PIPE_V>();
         Not(s.z, s.y, 34);
       }},
      {"reads GM that nothing wrote", "uninitialized", "reads GM byte 0", 1,
       [](GM_ADDR, GM_ADDR out) {
         Scratch s(false);
         DataCopy(s.x, global<uint16_t>(out), 16);
       }},
      {"copies beyond a GM tensor", "global bounds", "bytes 0 to 64 of a tensor of 32", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s(false);
         DataCopy(s.x, global<uint16_t>(in, 16), 32);
       }},
      {"copies beyond a GM allocation", "global bounds", "of a GM allocation of 65536 bytes", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s(false);
         DataCopy(s.x, global<uint16_t>(in, kBytes)[kBytes / 2 - 16], 32);
       }},
      {"copies from a host pointer", "global bounds", "GM allocation", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s(false);
         static uint8_t host[4096];
         DataCopy(s.x, global<uint16_t>(host, 2048), 32);
       }},
      {"uses more than a tensor has", "unified bounds", "of a tensor of 8192 bytes", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         Not(s.y, s.x, 4097);
       }},
      {"takes more of a TBuf than it has", "unified bounds", "bytes to 8194 of 8192", 1,
       [](GM_ADDR, GM_ADDR) {
         Scratch s;
         s.a.Get<uint16_t>(4097);
       }},
      {"two blocks store the same byte", "cross-block race", "which block", 3,
       [](GM_ADDR, GM_ADDR out) {
         Scratch s;
         hand_over<HardEvent::V_MTE3>();
         DataCopy(global<uint16_t>(out), s.x, 16);
       }},
      {"a block reads what another stores", "cross-block race", "in the same launch", 3,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s(false);
         Duplicate(s.x, (uint16_t)1, 16);
         hand_over<HardEvent::V_MTE3>();
         if (GetBlockIdx() == 1) {
           DataCopy(global<uint16_t>(in)[1024], s.x, 16);
         } else {
           DataCopy(s.y, global<uint16_t>(in)[1024], 16);
         }
       }},
      {"two blocks share a line of the scalar cache", "scalar cache line", "64-byte line", 3,
       [](GM_ADDR, GM_ADDR out) {
         auto g = global<int32_t>(out);
         g.SetValue(static_cast<uint64_t>(GetBlockIdx()), 7);
         DataCacheCleanAndInvalid<int32_t, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(g);
       }},
      {"leaves a scalar store in the cache", "scalar cache line", "dirty scalar cache lines", 1,
       [](GM_ADDR, GM_ADDR out) { global<int32_t>(out).SetValue(0, 7); }},
      {"adds atomically to what was never written", "uninitialized", "combines with GM byte 0", 1,
       [](GM_ADDR, GM_ADDR out) {
         Scratch s;
         hand_over<HardEvent::V_MTE3>();
         SetAtomicAdd<int16_t>();
         DataCopy(global<int16_t>(out), s.x.ReinterpretCast<int16_t>(), 16);
         SetAtomicNone();
       }},
      {"adds atomically as another type", "atomic", "after SetAtomicAdd<int32_t>", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s;
         hand_over<HardEvent::V_MTE3>();
         SetAtomicAdd<int32_t>();
         DataCopy(global<int16_t>(in), s.x.ReinterpretCast<int16_t>(), 16);
         SetAtomicNone();
       }},
      {"adds and maximizes the same byte", "cross-block race", "atomics of one kind", 3,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s;
         hand_over<HardEvent::V_MTE3>();
         if (GetBlockIdx() == 1) {
           SetAtomicAdd<int16_t>();
         } else {
           SetAtomicMax<int16_t>();
         }
         DataCopy(global<int16_t>(in), s.x.ReinterpretCast<int16_t>(), 16);
         SetAtomicNone();
       }},
      {"leaves atomic addition on", "atomic", "without SetAtomicNone", 1,
       [](GM_ADDR, GM_ADDR) { SetAtomicAdd<int32_t>(); }},
  };
}

inline std::vector<WrongKernel> pipe_rules() {
  return {
      {"a second TPipe", "pipe", "a second TPipe while one is alive", 1,
       [](GM_ADDR, GM_ADDR) {
         TPipe first;
         TPipe second;
       }},
      {"asks for more than UB", "pipe", "expected at most 188160", 1,
       [](GM_ADDR, GM_ADDR) {
         TPipe pipe;
         TBuf<TPosition::VECCALC> a, b;
         pipe.InitBuffer(a, 180 * 1024);
         pipe.InitBuffer(b, 4 * 1024);
       }},
      {"asks for 65 buffers", "pipe", "65 buffers, expected at most 64", 1,
       [](GM_ADDR, GM_ADDR) {
         TPipe pipe;
         TBuf<TPosition::VECCALC> buffers[65];
         for (auto& buffer : buffers) {
           pipe.InitBuffer(buffer, 32);
         }
       }},
      {"asks for 9 queue buffers at one position", "pipe",
       "9 queue buffers at one position, expected at most 8", 1,
       [](GM_ADDR, GM_ADDR) {
         TPipe pipe;
         TQue<TPosition::VECIN, 1> a, b;
         pipe.InitBuffer(a, 8, 32);
         pipe.InitBuffer(b, 1, 32);
       }},
      {"allocates more tensors than there are", "queue", "none of 2 buffers is free", 1,
       [](GM_ADDR, GM_ADDR) {
         TPipe pipe;
         TQue<TPosition::VECIN, 1> queue;
         pipe.InitBuffer(queue, 2, 32);
         queue.AllocTensor<half>();
         queue.AllocTensor<half>();
         queue.AllocTensor<half>();
       }},
      {"dequeues from an empty queue", "queue", "the queue is empty", 1,
       [](GM_ADDR, GM_ADDR) {
         TPipe pipe;
         TQue<TPosition::VECIN, 1> queue;
         pipe.InitBuffer(queue, 1, 32);
         queue.DeQue<half>();
       }},
      {"enqueues more than the depth", "queue", "expected at most the depth, 1", 1,
       [](GM_ADDR, GM_ADDR) {
         TPipe pipe;
         TQue<TPosition::VECIN, 1> queue;
         pipe.InitBuffer(queue, 2, 32);
         queue.EnQue(queue.AllocTensor<half>());
         queue.EnQue(queue.AllocTensor<half>());
       }},
      {"frees into another queue", "queue", "TQue.FreeTensor: a tensor of another queue", 1,
       [](GM_ADDR, GM_ADDR) {
         TPipe pipe;
         TQue<TPosition::VECIN, 1> a, b;
         pipe.InitBuffer(a, 1, 32);
         pipe.InitBuffer(b, 1, 32);
         auto tensor = a.AllocTensor<half>();
         b.FreeTensor(tensor);
       }},
      {"frees twice", "queue", "a tensor that was freed before", 1,
       [](GM_ADDR, GM_ADDR) {
         TPipe pipe;
         TQue<TPosition::VECOUT, 1> queue;
         pipe.InitBuffer(queue, 1, 32);
         auto tensor = queue.AllocTensor<half>();
         queue.FreeTensor(tensor);
         queue.FreeTensor(tensor);
       }},
      {"uses a tensor after freeing it", "queue", "used after FreeTensor", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s;
         TQue<TPosition::VECIN, 1> queue;
         s.pipe.InitBuffer(queue, 1, 256);
         auto tensor = queue.AllocTensor<uint16_t>();
         DataCopy(tensor, global<uint16_t>(in), 128);
         queue.EnQue(tensor);
         tensor = queue.DeQue<uint16_t>();
         queue.FreeTensor(tensor);
         Not(s.x, tensor, 128);
       }},
      {"uses a tensor while it is enqueued", "queue", "while it is enqueued", 1,
       [](GM_ADDR in, GM_ADDR) {
         Scratch s;
         TQue<TPosition::VECIN, 1> queue;
         s.pipe.InitBuffer(queue, 1, 256);
         auto tensor = queue.AllocTensor<uint16_t>();
         DataCopy(tensor, global<uint16_t>(in), 128);
         queue.EnQue(tensor);
         Not(s.x, tensor, 128);
       }},
      {"keeps a tensor for ever", "queue", "is still allocated, expected free", 1,
       [](GM_ADDR, GM_ADDR) {
         TPipe pipe;
         TQue<TPosition::VECOUT, 1> queue;
         pipe.InitBuffer(queue, 1, 32);
         queue.AllocTensor<half>();
       }},
      {"sets a flag twice", "event", "two SetFlag without a WaitFlag", 1,
       [](GM_ADDR, GM_ADDR) {
         SetFlag<HardEvent::V_S>(0);
         SetFlag<HardEvent::V_S>(0);
       }},
      {"waits for a flag that is never set", "event", "V_S id 0 was never set", 1,
       [](GM_ADDR, GM_ADDR) { WaitFlag<HardEvent::V_S>(0); }},
      {"leaves a flag set", "event", "was set and never waited for", 1,
       [](GM_ADDR, GM_ADDR) { SetFlag<HardEvent::V_S>(0); }},
      {"uses an id of the system", "event", "id 6, expected 0 to 5", 1,
       [](GM_ADDR, GM_ADDR) { hand_over<HardEvent::V_S>(6); }},
      {"takes the id that a queue uses", "event", "is in use by a queue", 1,
       [](GM_ADDR in, GM_ADDR) {
         TPipe pipe;
         TQue<TPosition::VECIN, 1> queue;
         pipe.InitBuffer(queue, 1, 256);
         auto tensor = queue.AllocTensor<uint16_t>();
         DataCopy(tensor, global<uint16_t>(in), 128);
         queue.EnQue(tensor);
         SetFlag<HardEvent::MTE2_V>(0);
       }},
      {"releases an id that was not allocated", "event", "was not allocated", 1,
       [](GM_ADDR, GM_ADDR) {
         TPipe pipe;
         pipe.ReleaseEventID<HardEvent::V_S>(2);
       }},
  };
}

}  // namespace wrong_kernels
