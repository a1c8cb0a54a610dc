// Why a storage stays: what statistics count by, in the words that users read (docs/choosing.md
// says what each means).
#pragma once

namespace memswap {

// Why a storage stays: one of those below, and the same one where it has the same address; nullptr:
// it does not stay.
using Reason = const char*;

}  // namespace memswap

namespace memswap::reasons {

// What Python code keeps has words of its own.

// What it is.
inline constexpr char kParameter[] = "parameter";
inline constexpr char kPrivateFormat[] = "private format";
inline constexpr char kTraced[] = "traced";
inline constexpr char kSmall[] = "small";
inline constexpr char kEditedInParts[] = "edited in parts";
inline constexpr char kPartOfData[] = "part of data";
inline constexpr char kResized[] = "resized";

// Where and when it is saved.
inline constexpr char kSavedInBackward[] = "saved in backward";
inline constexpr char kStreamCapture[] = "stream capture";
inline constexpr char kHostMemory[] = "host memory beside an accelerator";

// Who wants it to stay.
inline constexpr char kPolicy[] = "policy";
inline constexpr char kPlanned[] = "planned";
inline constexpr char kNeededAtOnce[] = "needed at once";
inline constexpr char kNeverFreed[] = "never freed";
inline constexpr char kHeldAtPeak[] = "held at the peak";

// Why it could not be sent.
inline constexpr char kPool[] = "pool";
inline constexpr char kCodecRoom[] = "codec room";
inline constexpr char kNoCodec[] = "no codec";
inline constexpr char kCodecFault[] = "codec failed its check";
inline constexpr char kDoesNotShrink[] = "does not shrink";
inline constexpr char kNoRecipe[] = "no recipe";

}  // namespace memswap::reasons
