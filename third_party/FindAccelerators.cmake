# Which accelerator toolkits this machine has. AUTO takes what is there, ON insists, OFF ignores.
include(CheckLanguage)

if(NOT MEMSWAP_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MEMSWAP_CUDA is '${MEMSWAP_CUDA}'; expected AUTO, ON or OFF.")
endif()
if(NOT MEMSWAP_ASCEND MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MEMSWAP_ASCEND is '${MEMSWAP_ASCEND}'; expected AUTO, ON or OFF.")
endif()

set(memswap_has_cuda OFF)
if(NOT MEMSWAP_CUDA STREQUAL "OFF")
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES 80 90)
    set(CMAKE_CUDA_STANDARD 17)  # CMake 3.25 knows no C++20 for nvcc 13
    enable_language(CUDA)
    set(memswap_has_cuda ON)
  elseif(MEMSWAP_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MEMSWAP_CUDA=ON, but no nvcc was found. Put it on PATH, set CUDACXX, or "
                        "build with MEMSWAP_CUDA=AUTO.")
  endif()
endif()

if(MEMSWAP_ASCEND STREQUAL "ON")
  message(FATAL_ERROR "MEMSWAP_ASCEND=ON: this version of memswap cannot launch its AscendC kernels yet "
                      "(docs/status.md). Saved activations are swapped on an NPU without them; "
                      "build with MEMSWAP_ASCEND=AUTO.")
endif()

message(STATUS "memswap: CUDA sources ${memswap_has_cuda}")
