# Where CANN is, and which. As a script (cmake -P) it prints the answer: setup.py asks before it chooses
# a generator, so that both look in the same places.

# memswap_cann_home: where set_env.sh says, else where CANN's installers put it, for all and for one.
set(memswap_cann_home "$ENV{ASCEND_HOME_PATH}")
if(NOT memswap_cann_home)
  foreach(folder /usr/local/Ascend $ENV{HOME}/Ascend)
    foreach(name ascend-toolkit/latest cann)
      if(NOT memswap_cann_home AND EXISTS ${folder}/${name})
        set(memswap_cann_home ${folder}/${name})
      endif()
    endforeach()
  endforeach()
endif()
if(NOT memswap_cann_home)
  set(memswap_cann_home /usr/local/Ascend/ascend-toolkit/latest)
endif()

# memswap_cann: "asc" where CANN brings a CMake language of its own (9), "ascendc" where it brings
# ascendc.cmake (8; memswap_ascendc_cmake is its path), else OFF.
set(memswap_cann OFF)
if(NOT MEMSWAP_ASCEND STREQUAL "OFF")
  find_package(ASC QUIET HINTS ${memswap_cann_home})
  find_file(memswap_ascendc_cmake ascendc.cmake NO_DEFAULT_PATH PATHS
    ${memswap_cann_home}/tools/tikcpp/ascendc_kernel_cmake
    ${memswap_cann_home}/compiler/tikcpp/ascendc_kernel_cmake
    ${memswap_cann_home}/ascendc_devkit/tikcpp/samples/cmake)
  if(ASC_FOUND)
    set(memswap_cann asc)
  elseif(memswap_ascendc_cmake)
    set(memswap_cann ascendc)
  endif()
endif()

# memswap_cann_missing: what is missing, and how to get it, in one line; empty where nothing is.
set(memswap_cann_missing "")
if(NOT memswap_cann)
  set(memswap_cann_missing "no CANN was found in ${memswap_cann_home}: neither ascendc.cmake (CANN 8) \
nor the CMake package ASC (CANN 9). Install CANN's toolkit, run its set_env.sh, which sets \
ASCEND_HOME_PATH, and build again.")
else()
  foreach(needed include/acl/acl.h lib64/libascendcl.so)
    if(NOT EXISTS ${memswap_cann_home}/${needed})
      set(memswap_cann_missing "CANN in ${memswap_cann_home} has no ${needed}. Install CANN's whole \
toolkit, run its set_env.sh, which sets ASCEND_HOME_PATH, and build again.")
    endif()
  endforeach()
  if(CMAKE_GENERATOR MATCHES "Ninja")
    set(memswap_cann_missing "CANN's kernels are built by make: its CMake functions run builds of \
their own, which fail under ${CMAKE_GENERATOR}. Configure with -G 'Unix Makefiles', or without \
CMAKE_GENERATOR, and build again.")
  endif()
endif()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  message(STATUS "memswap: CANN ${memswap_cann}")
endif()
