# Which accelerator toolkits this machine has. AUTO takes what is there, ON insists, OFF ignores.
set(MEMSWAP_CUDA AUTO CACHE STRING "Compile the CUDA sources: AUTO (where nvcc works), ON, OFF")
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

# memswap_has_cuda: whether CUDA sources can be compiled, and beside a torch with CUDA can run.
# memswap_cuda_missing: what is missing where not, and how to get it, in one line.
include(${CMAKE_CURRENT_LIST_DIR}/ProbeCuda.cmake)
set(memswap_has_cuda OFF)
set(memswap_cuda_missing "")
if(NOT MEMSWAP_CUDA STREQUAL "OFF")
  set(get "Install the CUDA toolkit, ${MEMSWAP_LEAST_NVCC} or newer")
  if(TORCH_CUDA_VERSION)
    set(get "Install the CUDA toolkit ${TORCH_CUDA_VERSION}, as torch has it")
  endif()
  memswap_probe_nvcc(${CMAKE_CURRENT_BINARY_DIR}/memswap_nvcc
                     "${get}, put its nvcc on PATH or name it in CUDACXX, and build again.")
  set(memswap_cuda_missing "${memswap_nvcc_problem}")
  if(TORCH_CUDA_VERSION AND memswap_cuda_missing STREQUAL "")
    memswap_probe_driver()
    memswap_compare_cuda("${memswap_nvcc_version}" "${TORCH_CUDA_VERSION}" "${memswap_driver_cuda}")
    set(memswap_cuda_missing "${memswap_cuda_mismatch}")
  endif()
  if(memswap_cuda_missing STREQUAL "")
    set(CMAKE_CUDA_COMPILER "${memswap_nvcc}" CACHE FILEPATH "nvcc")
    if(memswap_nvcc_host)
      set(CMAKE_CUDA_HOST_COMPILER "${memswap_nvcc_host}" CACHE FILEPATH "nvcc's host compiler")
    endif()
    set(CMAKE_CUDA_ARCHITECTURES ${MEMSWAP_CUDA_ARCHITECTURES})
    if(NOT MEMSWAP_CUDA_ARCHITECTURES)
      foreach(architecture 80 90)
        if(architecture IN_LIST memswap_nvcc_architectures)
          list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture})
        endif()
      endforeach()
    endif()
    set(CMAKE_CUDA_STANDARD 17)  # CMake 3.25 knows no C++20 for nvcc 13
    enable_language(CUDA)
    set(memswap_has_cuda ON)
  elseif(MEMSWAP_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MEMSWAP_CUDA=ON, but ${memswap_cuda_missing}")
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
