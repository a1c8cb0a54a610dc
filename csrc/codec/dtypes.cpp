#include "dtypes.h"

#include <stdexcept>
#include <string>

namespace memswap {

frame::Dtype frame_dtype(c10::ScalarType dtype) {
  using c10::ScalarType;
  using frame::Dtype;
  switch (c10::isComplexType(dtype) ? c10::toRealValueType(dtype) : dtype) {
    case ScalarType::BFloat16:
      return Dtype::kBf16;
    case ScalarType::Half:
      return Dtype::kFp16;
    case ScalarType::Float:
      return Dtype::kFp32;
    case ScalarType::Double:
      return Dtype::kFp64;
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e4m3fnuz:
      return Dtype::kE4m3;
    case ScalarType::Float8_e5m2:
    case ScalarType::Float8_e5m2fnuz:
      return Dtype::kE5m2;
    case ScalarType::Bool:
      return Dtype::kBool;
    case ScalarType::Char:
      return Dtype::kInt8;
    case ScalarType::Byte:
      return Dtype::kUint8;
    case ScalarType::Short:
      return Dtype::kInt16;
    case ScalarType::UInt16:
      return Dtype::kUint16;
    case ScalarType::Int:
      return Dtype::kInt32;
    case ScalarType::UInt32:
      return Dtype::kUint32;
    case ScalarType::Long:
      return Dtype::kInt64;
    case ScalarType::UInt64:
      return Dtype::kUint64;
    default:
      break;
  }
  switch (c10::elementSize(dtype)) {
    case 1:
      return Dtype::kBits8;
    case 2:
      return Dtype::kBits16;
    case 4:
      return Dtype::kBits32;
    case 8:
      return Dtype::kBits64;
    default:
      throw std::invalid_argument(std::string("no frame has elements like those of ") +
                                  c10::toString(dtype));
  }
}

}  // namespace memswap
