"""CMake finds a CANN and builds the Ascend codec with it: here against stand-ins for CANN 8 and 9.

The stand-ins have CANN's layout and ascendc.cmake's functions, or a CMake language ASC; what they
make of the kernels launches nothing.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not on PATH")

ASCENDC = """
function(ascendc_library name kind)
  foreach(source ${ARGN})
    if(NOT EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${source})
      message(FATAL_ERROR "no kernels in ${source}")
    endif()
  endforeach()
  message(STATUS "stand-in: ${kind} ${ARGN} for ${SOC_VERSION} by ${ASCEND_CANN_PACKAGE_PATH}")
  add_library(${name} ${kind} ${ASCEND_CANN_PACKAGE_PATH}/launches.cpp)
  target_include_directories(${name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
endfunction()
function(ascendc_include_directories name scope)
  target_include_directories(${name} ${scope} ${ARGN})
endfunction()
"""

LAUNCHES = """
#include "entries.h"
#define ENCODE(name, coder) \\
  MEMSWAP_ASCEND_ENCODE_STUB(encode_##name) { return *static_cast<uint8_t*>(input) + blocks; }
#define DECODE(name, width, split) MEMSWAP_ASCEND_DECODE_STUB(name) { return 7; }
extern "C" {
MEMSWAP_ASCEND_ENCODE_STUB(begin_frame) { return 0; }
MEMSWAP_ASCEND_ENCODE_STUB(place_deferred) { return 0; }
MEMSWAP_ASCEND_ENCODERS(ENCODE)
MEMSWAP_ASCEND_DECODERS(DECODE)
}
"""


# CANN 9: a package that brings a language. Its compiler notes what it was given.
ASC_CONFIG = """
list(APPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR})
set(ASC_FOUND TRUE)
"""
ASC_LANGUAGE = {
    "CMakeDetermineASCCompiler.cmake": """
set(CMAKE_ASC_COMPILER ${CMAKE_CURRENT_LIST_DIR}/bisheng)
set(CMAKE_ASC_COMPILER_ENV_VAR ASCCXX)
configure_file(${CMAKE_CURRENT_LIST_DIR}/CMakeASCCompiler.cmake.in
               ${CMAKE_PLATFORM_INFO_DIR}/CMakeASCCompiler.cmake @ONLY)
""",
    "CMakeASCCompiler.cmake.in": """
set(CMAKE_ASC_COMPILER "@CMAKE_ASC_COMPILER@")
set(CMAKE_ASC_SOURCE_FILE_EXTENSIONS asc)
set(CMAKE_ASC_OUTPUT_EXTENSION .o)
set(CMAKE_ASC_COMPILER_WORKS TRUE)
""",
    "CMakeTestASCCompiler.cmake": "",
    "CMakeASCInformation.cmake": """
set(CMAKE_INCLUDE_FLAG_ASC -I)
set(CMAKE_ASC_COMPILE_OBJECT
    "<CMAKE_ASC_COMPILER> --npu-arch=${CMAKE_ASC_ARCHITECTURES} <INCLUDES> <SOURCE> <OBJECT>")
set(CMAKE_ASC_CREATE_STATIC_LIBRARY "${CMAKE_AR} qc <TARGET> <OBJECTS>")
""",
    "bisheng": """#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$here/said"
for last in "$@"; do :; done
includes=$(echo "$@" | tr ' ' '\\n' | grep ^-I)
exec g++ -fPIC $includes -c "$here/launches.cpp" -o "$last"
""",
}


@pytest.fixture
def cann_9(cann: Path) -> Path:
    """The folder of a CANN 9 that compiles nothing for a device."""
    shutil.rmtree(cann / "compiler")
    modules = cann / "lib" / "cmake" / "ASC"
    modules.mkdir(parents=True)
    (modules / "ASCConfig.cmake").write_text(ASC_CONFIG)
    for name, content in ASC_LANGUAGE.items():
        (modules / name).write_text(content)
    (modules / "bisheng").chmod(0o755)
    shutil.copy(cann / "launches.cpp", modules)
    return cann


@pytest.fixture
def cann(tmp_path: Path) -> Path:
    """The folder of a CANN 8 that compiles nothing for a device."""
    home = tmp_path / "cann"
    modules = home / "compiler" / "tikcpp" / "ascendc_kernel_cmake"
    modules.mkdir(parents=True)
    (modules / "ascendc.cmake").write_text(ASCENDC)
    (home / "launches.cpp").write_text(LAUNCHES)
    (home / "include" / "acl").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "ascend_emulator" / "acl" / "acl.h", home / "include" / "acl")
    (home / "lib64").mkdir()
    (home / "lib64" / "libascendcl.so").touch()
    return home


def configure(build: Path, home: Path, option: str = "AUTO") -> subprocess.CompletedProcess[str]:
    """Configure the codec's own project."""
    command = ["cmake", f"-S{ROOT / 'kernels'}", f"-B{build}", "-DMEMSWAP_CUDA=OFF"]
    return subprocess.run(
        [*command, f"-DMEMSWAP_ASCEND={option}"],
        env={**os.environ, "ASCEND_HOME_PATH": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_cann_is_found_and_the_codec_is_built_with_it(tmp_path: Path, cann: Path) -> None:
    configured = configure(tmp_path / "build", cann)
    assert configured.returncode == 0, configured.stderr
    assert "memswap: CANN ascendc" in configured.stdout
    assert f"encoders.cpp;decoders.cpp for ascend910b1 by {cann}" in configured.stdout
    command = ["cmake", "--build", str(tmp_path / "build"), "--target", "memswap_codec_ascend"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr


def test_a_cann_9_compiles_kernels_and_launches_of_one_file(tmp_path: Path, cann_9: Path) -> None:
    configured = configure(tmp_path / "build", cann_9)
    assert configured.returncode == 0, configured.stderr
    assert "memswap: CANN asc" in configured.stdout
    command = ["cmake", "--build", str(tmp_path / "build"), "--target", "memswap_codec_ascend"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (said,) = (cann_9 / "lib" / "cmake" / "ASC" / "said").read_text().splitlines()
    assert "--npu-arch=dav-2201" in said and "ascend/kernels.asc" in said


def test_without_a_cann_on_says_what_is_missing_and_auto_builds_without(tmp_path: Path) -> None:
    refused = configure(tmp_path / "on", tmp_path, "ON")
    assert refused.returncode != 0
    assert "no CANN was found" in refused.stderr and "ASCEND_HOME_PATH" in refused.stderr
    configured = configure(tmp_path / "auto", tmp_path)
    assert configured.returncode == 0, configured.stderr
    assert "memswap: CANN OFF" in configured.stdout
