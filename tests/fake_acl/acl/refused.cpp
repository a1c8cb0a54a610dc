// What torch_npu links to and these tests do not need. Each refuses: a call that silently did
// nothing would let an operator return garbage.
#include "calls.h"

#define REFUSE(name)                                                                             \
  FAKE_ACL_EXPORT aclError name() {                                                              \
    const aclError injected = fake_acl::enter(#name);                                            \
    return injected ? injected : fake_acl::fail(fake_acl::kNotSupported, #name " is not there"); \
  }
#define RETURNS_NULL(name) \
  FAKE_ACL_EXPORT void* name() { return nullptr; }
#define DOES_NOTHING(name) \
  FAKE_ACL_EXPORT uint64_t name() { return 0; }

// The older way to run operators. There are no kernels: torch/operators.cpp runs them instead.
REFUSE(aclopCompileAndExecute)
REFUSE(aclopSetAttrBool)
REFUSE(aclopSetAttrDataType)
REFUSE(aclopSetAttrFloat)
REFUSE(aclopSetAttrInt)
REFUSE(aclopSetAttrListBool)
REFUSE(aclopSetAttrListFloat)
REFUSE(aclopSetAttrListInt)
REFUSE(aclopSetAttrListListInt)
REFUSE(aclopSetAttrString)
REFUSE(aclGetTensorDescDimV2)
REFUSE(aclGetTensorDescFormat)
REFUSE(aclGetTensorDescNumDims)
REFUSE(aclGetTensorDescType)
REFUSE(aclSetTensorFormat)
REFUSE(aclSetTensorPlaceMent)
REFUSE(aclSetTensorShape)
RETURNS_NULL(aclopCreateAttr)
RETURNS_NULL(aclCreateDataBuffer)
RETURNS_NULL(aclCreateTensorDesc)
DOES_NOTHING(aclopDestroyAttr)
DOES_NOTHING(aclDestroyDataBuffer)
DOES_NOTHING(aclDestroyTensorDesc)
DOES_NOTHING(aclSetTensorDescName)

// Options of the operator compiler, which torch_npu sets while it starts.
DOES_NOTHING(aclSetCompileopt)
DOES_NOTHING(aclopSetCompileFlag)

// Binaries of kernels, peers, virtual memory, graphs, dumps.
REFUSE(aclrtBinaryGetFunction)
REFUSE(aclrtBinaryLoadFromData)
REFUSE(aclrtGetFunctionAddr)
REFUSE(rtDevBinaryRegister)
REFUSE(rtFunctionRegister)
REFUSE(rtGetC2cCtrlAddr)
REFUSE(rtKernelLaunch)
REFUSE(aclrtDeviceEnablePeerAccess)
REFUSE(aclrtFreePhysical)
REFUSE(aclrtMallocPhysical)
REFUSE(aclrtMapMem)
REFUSE(aclrtUnmapMem)
REFUSE(aclrtReserveMemAddress)
REFUSE(aclrtReleaseMemAddress)
REFUSE(aclrtMemExportToShareableHandle)
REFUSE(aclrtMemImportFromShareableHandle)
REFUSE(aclrtMemSetPidToShareableHandle)
REFUSE(aclmdlInitDump)
REFUSE(aclmdlSetDump)
REFUSE(aclmdlFinalizeDump)

// The profiler is off.
DOES_NOTHING(MsprofGetHashId)
DOES_NOTHING(MsprofRegisterCallback)
DOES_NOTHING(MsprofReportAdditionalInfo)
DOES_NOTHING(MsprofReportApi)
DOES_NOTHING(MsprofReportCompactInfo)
DOES_NOTHING(MsprofSysCycleTime)
