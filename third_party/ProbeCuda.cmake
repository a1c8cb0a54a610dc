# What this machine has for CUDA, found out before anything is built with it: CMake ends a build whose
# CUDA compiler does not work, and a toolkit that torch or the driver cannot go with shows only in
# training. Nothing here needs a project, so tests call it from scripts (tests/unit/test_cuda_probe.py).

# sm_90 is what the sources name and no older nvcc knows.
set(MEMSWAP_LEAST_NVCC 11.8)
# Where installers put a toolkit.
set(memswap_cuda_folders /usr/local/cuda /opt/cuda)

# Sets, in the caller: memswap_nvcc (its path), memswap_nvcc_version (13.0),
# memswap_nvcc_architectures (80;90;...: what it compiles for), memswap_nvcc_host (a host compiler that
# it has to be told of, or empty), and memswap_nvcc_problem, which is empty where it compiles.
# `folder`: for a trial. `get`: a sentence that says how to get one.
function(memswap_probe_nvcc folder get)
  set(memswap_nvcc_architectures "")
  set(memswap_nvcc_host "")
  set(memswap_nvcc_version "")
  set(nvcc NOTFOUND)
  if(CMAKE_CUDA_COMPILER)
    set(nvcc "${CMAKE_CUDA_COMPILER}")
  elseif(NOT "$ENV{CUDACXX}" STREQUAL "")
    separate_arguments(words UNIX_COMMAND "$ENV{CUDACXX}")
    list(GET words 0 named)
    find_program(nvcc NAMES "${named}" NO_CACHE)
    if(NOT nvcc)
      set(memswap_nvcc_problem "CUDACXX is '$ENV{CUDACXX}', and there is no such program. ${get}")
    endif()
  else()
    find_program(nvcc NAMES nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS ${memswap_cuda_folders}
                 PATH_SUFFIXES bin NO_CMAKE_SYSTEM_PATH NO_CACHE)
    if(NOT nvcc)
      set(memswap_nvcc_problem
          "no nvcc was found (on PATH, in CUDACXX, CUDA_HOME or /usr/local/cuda). ${get}")
    endif()
  endif()
  if(nvcc)
    memswap_try_nvcc("${nvcc}" "${folder}" "${get}")
  endif()
  set(memswap_nvcc "${nvcc}")
  foreach(name nvcc nvcc_version nvcc_architectures nvcc_host nvcc_problem)
    set(memswap_${name} "${memswap_${name}}" PARENT_SCOPE)
  endforeach()
endfunction()

# One nvcc: which version, for which architectures, and whether it compiles a file.
macro(memswap_try_nvcc nvcc folder get)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE said ERROR_VARIABLE said
                  RESULT_VARIABLE code)
  execute_process(COMMAND "${nvcc}" --list-gpu-arch OUTPUT_VARIABLE listed ERROR_QUIET)
  string(REGEX MATCHALL "compute_[0-9]+" memswap_nvcc_architectures "${listed}")
  list(TRANSFORM memswap_nvcc_architectures REPLACE "compute_" "")
  if(NOT code EQUAL 0 OR NOT said MATCHES "release ([0-9]+\\.[0-9]+)")
    set(memswap_nvcc_problem "${nvcc} does not say its version as an nvcc does. ${get}")
  else()
    set(memswap_nvcc_version "${CMAKE_MATCH_1}")
    if(memswap_nvcc_version VERSION_LESS MEMSWAP_LEAST_NVCC)
      set(memswap_nvcc_problem "nvcc ${memswap_nvcc_version} (${nvcc}) is too old: the sources need \
${MEMSWAP_LEAST_NVCC} or newer. ${get}")
    else()
      memswap_try_compiling("${nvcc}" "${folder}")
    endif()
  endif()
endmacro()

# With the host compiler that was asked for; else with nvcc's own choice, which is g++, and where that
# does not work with the compiler of this build (a machine may have clang alone).
macro(memswap_try_compiling nvcc folder)
  set(memswap_nvcc_problem "")
  set(source "${folder}/probe.cu")
  file(WRITE "${source}" "#include <type_traits>\n__global__ void probe(int* to) { *to = 1; }\n")
  list(GET memswap_nvcc_architectures 0 architecture)
  if("80" IN_LIST memswap_nvcc_architectures)
    set(architecture 80)
  endif()
  set(hosts "-")
  if(CMAKE_CUDA_HOST_COMPILER)
    set(hosts "${CMAKE_CUDA_HOST_COMPILER}")
  elseif(NOT "$ENV{CUDAHOSTCXX}" STREQUAL "")
    set(hosts "$ENV{CUDAHOSTCXX}")
  elseif(CMAKE_CXX_COMPILER)
    list(APPEND hosts "${CMAKE_CXX_COMPILER}")
  endif()
  foreach(host IN LISTS hosts)
    set(command "${nvcc}" -std=c++17 -arch=sm_${architecture} -c "${source}" -o "${source}.o")
    if(NOT host STREQUAL "-")
      list(APPEND command -ccbin "${host}")
    endif()
    execute_process(COMMAND ${command} OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE code)
    if(code EQUAL 0)
      set(memswap_nvcc_problem "")
      if(NOT host STREQUAL "-")
        set(memswap_nvcc_host "${host}")
      endif()
      break()
    elseif(memswap_nvcc_problem STREQUAL "")
      string(REGEX MATCH "[^\n]*error[^\n]*" reason "${said}")
      if(reason STREQUAL "")
        string(REGEX MATCH "[^\n]+" reason "${said}")
      endif()
      set(memswap_nvcc_problem "nvcc ${memswap_nvcc_version} (${nvcc}) does not compile a file of two \
lines: '${reason}'. Name a host compiler that it supports in CUDAHOSTCXX, or another nvcc in CUDACXX, \
and build again.")
    endif()
  endforeach()
endmacro()

# Sets memswap_driver_cuda: the CUDA version that the driver here has (12.4); empty where there is none.
function(memswap_probe_driver)
  set(memswap_driver_cuda "" PARENT_SCOPE)
  set(smi NOTFOUND)
  find_program(smi NAMES nvidia-smi PATHS /usr/lib/wsl/lib NO_CACHE)
  if(smi)
    execute_process(COMMAND "${smi}" OUTPUT_VARIABLE said ERROR_QUIET TIMEOUT 60)
    if(said MATCHES "CUDA( UMD)? Version: *([0-9]+\\.[0-9]+)")
      set(memswap_driver_cuda "${CMAKE_MATCH_2}" PARENT_SCOPE)
    endif()
  endif()
endfunction()

# Sets memswap_cuda_mismatch: why what nvcc `nvcc` makes would not run beside a torch of CUDA `torch` on
# a driver of CUDA `driver` (empty: none here, so nobody knows); empty where it would. Within a major
# version newer toolkits run on older drivers, and older major versions always do.
function(memswap_compare_cuda nvcc torch driver)
  string(REGEX MATCH "^[0-9]+" nvcc_major "${nvcc}")
  string(REGEX MATCH "^[0-9]+" torch_major "${torch}")
  string(REGEX MATCH "^[0-9]+" driver_major "${driver}")
  set(problem "")
  if(nvcc_major GREATER torch_major)
    set(problem "nvcc ${nvcc} is newer than torch's CUDA ${torch}. Name an nvcc of CUDA \
${torch_major} in CUDACXX, or install a torch for CUDA ${nvcc_major}, and build again.")
  elseif(driver_major AND nvcc_major GREATER driver_major)
    set(problem "nvcc ${nvcc} is newer than the driver, which has CUDA ${driver}. Update the driver, \
or name an nvcc of CUDA ${driver_major} in CUDACXX, and build again.")
  endif()
  set(memswap_cuda_mismatch "${problem}" PARENT_SCOPE)
endfunction()

# Sets `chosen`, as CMAKE_CUDA_ARCHITECTURES has them: machine code for those that we name and nvcc knows
# (`known`), and PTX for what comes. PTX of 100 rather than of 120: 11.0 lies between them.
function(memswap_choose_architectures known chosen)
  set(found)
  foreach(architecture 80 90 100 120)
    if(architecture IN_LIST known)
      list(APPEND found ${architecture}-real)
      if(architecture LESS_EQUAL 100)
        set(newest ${architecture}-virtual)
      endif()
    endif()
  endforeach()
  set(${chosen} ${found} ${newest} PARENT_SCOPE)
endfunction()
