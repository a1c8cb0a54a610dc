"""WorkspaceRecord: what was on a device beside saved activations in one iteration. It is native."""

from __future__ import annotations

from memswap._native import native

#: Allocators of accelerators round up to this.
GRANULARITY_BYTES = 512

#: What a recorder has seen ([Note: Workspace] in csrc/engine/workspace.h).
WorkspaceRecord = native.WorkspaceRecord
