# Which accelerator toolkits this machine has. AUTO takes what is there, ON insists, OFF ignores.
include(CheckLanguage)

set(MEMSWAP_CUDA AUTO CACHE STRING "Compile the CUDA sources: AUTO (where nvcc is found), ON, OFF")
set(MEMSWAP_ASCEND AUTO CACHE STRING "Compile the AscendC sources: AUTO (where CANN is found), ON, OFF")

if(NOT MEMSWAP_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MEMSWAP_CUDA is '${MEMSWAP_CUDA}'; expected AUTO, ON or OFF.")
endif()
if(NOT MEMSWAP_ASCEND MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MEMSWAP_ASCEND is '${MEMSWAP_ASCEND}'; expected AUTO, ON or OFF.")
endif()

# What the codec is compiled for; empty: machine code and PTX for everything that is supported.
set(MEMSWAP_CUDA_ARCHITECTURES "" CACHE STRING
    "CUDA architectures, as CMAKE_CUDA_ARCHITECTURES has them (90-real); empty: all supported ones")

set(memswap_has_cuda OFF)
if(NOT MEMSWAP_CUDA STREQUAL "OFF")
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES 80 90)
    if(MEMSWAP_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES ${MEMSWAP_CUDA_ARCHITECTURES})
    endif()
    set(CMAKE_CUDA_STANDARD 17)  # CMake 3.25 knows no C++20 for nvcc 13
    enable_language(CUDA)
    set(memswap_has_cuda ON)
  elseif(MEMSWAP_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MEMSWAP_CUDA=ON, but no nvcc was found. Put it on PATH, set CUDACXX, or "
                        "build with MEMSWAP_CUDA=AUTO.")
  endif()
endif()

# memswap_cann: "asc" where CANN brings a CMake language of its own (9), "ascendc" where it brings
# ascendc.cmake (8; memswap_ascendc_cmake is its path), else OFF. memswap_cann_home: its folder.
set(memswap_cann OFF)
if(NOT MEMSWAP_ASCEND STREQUAL "OFF")
  set(memswap_cann_home "$ENV{ASCEND_HOME_PATH}")
  if(NOT memswap_cann_home)
    set(memswap_cann_home /usr/local/Ascend/ascend-toolkit/latest)
  endif()
  find_package(ASC QUIET HINTS ${memswap_cann_home})
  find_file(memswap_ascendc_cmake ascendc.cmake NO_DEFAULT_PATH PATHS
    ${memswap_cann_home}/tools/tikcpp/ascendc_kernel_cmake
    ${memswap_cann_home}/compiler/tikcpp/ascendc_kernel_cmake
    ${memswap_cann_home}/ascendc_devkit/tikcpp/samples/cmake)
  if(ASC_FOUND)
    set(CMAKE_ASC_ARCHITECTURES dav-2201)
    set(CMAKE_ASC_RUN_MODE npu)
    enable_language(ASC)
    set(memswap_cann asc)
  elseif(memswap_ascendc_cmake)
    set(memswap_cann ascendc)
  elseif(MEMSWAP_ASCEND STREQUAL "ON")
    message(FATAL_ERROR "MEMSWAP_ASCEND=ON, but no CANN was found in ${memswap_cann_home}: neither "
                        "ascendc.cmake (CANN 8) nor the CMake package ASC (CANN 9). Run CANN's "
                        "set_env.sh, which sets ASCEND_HOME_PATH, or build with "
                        "MEMSWAP_ASCEND=AUTO.")
  endif()
endif()
set(memswap_with_ascend_codec OFF)
if(memswap_cann)
  set(memswap_with_ascend_codec ON)
endif()

message(STATUS "memswap: CUDA sources ${memswap_has_cuda}")
message(STATUS "memswap: CANN ${memswap_cann}")
