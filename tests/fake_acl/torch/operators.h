#pragma once

namespace fake_acl {

// Once, after torch_npu was imported.
void register_operators();

}  // namespace fake_acl
