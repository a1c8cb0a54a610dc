# The torch of the Python that runs the build: headers and libraries, nothing else of its CMake
# package (which would insist on the CUDA toolkit that torch was built with).
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)

execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import importlib.util, os, torch; print(os.path.dirname(torch.__file__), torch.__version__, torch.version.cuda or 0, int(bool(importlib.util.find_spec('torch_npu'))), sep='\\n')"
  OUTPUT_VARIABLE torch_answer
  ERROR_VARIABLE torch_error
  RESULT_VARIABLE torch_result
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch_result EQUAL 0)
  message(FATAL_ERROR
    "memswap is built against the torch that will import it, and ${Python_EXECUTABLE} has none. "
    "Install it first (for example: pip install torch==2.13.0) and build with --no-build-isolation.")
endif()
string(REPLACE "\n" ";" torch_answer "${torch_answer}")
list(GET torch_answer 0 TORCH_ROOT)
list(GET torch_answer 1 TORCH_VERSION)
list(GET torch_answer 2 TORCH_CUDA_VERSION)  # 13.0; 0 without CUDA
list(GET torch_answer 3 TORCH_HAS_NPU)
if(TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "memswap needs torch >= 2.11; found ${TORCH_VERSION}.")
endif()
message(STATUS "memswap: torch ${TORCH_VERSION} in ${TORCH_ROOT}")

add_library(torch_headers INTERFACE)
target_include_directories(torch_headers SYSTEM INTERFACE
  ${TORCH_ROOT}/include ${TORCH_ROOT}/include/torch/csrc/api/include ${Python_INCLUDE_DIRS})

# No run path: torch is imported before memswap._C, so its libraries are already in the process.
foreach(name c10 torch_cpu torch_python)
  add_library(${name} SHARED IMPORTED)
  set_target_properties(${name} PROPERTIES IMPORTED_LOCATION ${TORCH_ROOT}/lib/lib${name}.so)
endforeach()
add_library(torch_libraries INTERFACE)
target_link_libraries(torch_libraries INTERFACE torch_cpu c10)
