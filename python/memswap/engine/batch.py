"""Batch: what one block of a group saved, moved when it is told to. It is native."""

from __future__ import annotations

from memswap._native import native

#: What one block of a group saved (csrc/engine/batch.h).
Batch = native.Batch

#: The call that a batch had last.
Phase = native.Phase

#: Storages of a batch of more bytes travel alone, and most bytes that travel together:
#: [Note: When storages travel together] in csrc/engine/batch.h.
SMALL_BYTES, BUCKET_BYTES = native.BATCH_LIMITS
