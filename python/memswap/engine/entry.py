"""Entry: one storage that autograd saved, and where its bytes are. It is native."""

from __future__ import annotations

from memswap._native import native

#: Where an entry's bytes are. Which steps are legal: csrc/engine/residence.h.
State = native.State

#: One saved storage that may leave (csrc/engine/entry.h).
Entry = native.Entry
