"""CMake finds a CANN and builds the Ascend codec with it: here against stand-ins for CANN 8 and 9.

The stand-ins have CANN's layout and ascendc.cmake's functions, or a CMake language ASC; what they
make of the kernels launches nothing.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not on PATH")

#: Of the build, which the environment may set; `make test` sets the last one.
OPTIONS = ("MEMSWAP_CUDA", "MEMSWAP_CUDA_ARCHITECTURES", "MEMSWAP_ASCEND", "MEMSWAP_WERROR")

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
MEMSWAP_ASCEND_ENCODE_STUB(place_tiles) { return 0; }
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


def configure(
    build: Path, home: Path, option: str = "AUTO", generator: str = "Unix Makefiles"
) -> subprocess.CompletedProcess[str]:
    """Configure the codec's own project."""
    command = ["cmake", f"-S{ROOT / 'kernels'}", f"-B{build}", "-DMEMSWAP_CUDA=OFF"]
    command.append(f"-G{generator}")
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


def without_environment(home: Path, **changes: str) -> dict[str, str]:
    """No set_env.sh has run, and CANN is where its installer puts it for the user of `home`."""
    names = ("ASCEND_HOME_PATH", "CMAKE_GENERATOR", "CMAKE_ARGS", "PYTHONPATH", *OPTIONS)
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "HOME": str(home), **changes}


@pytest.fixture
def home(tmp_path: Path, cann: Path) -> Path:
    """A user's folder with a CANN at its default path."""
    if Path("/usr/local/Ascend").exists():
        pytest.skip("this machine has a CANN of its own")
    (tmp_path / "home" / "Ascend" / "ascend-toolkit").mkdir(parents=True)
    cann.rename(tmp_path / "home" / "Ascend" / "ascend-toolkit" / "latest")
    return tmp_path / "home"


CMAKE = """#!/bin/sh
case "$*" in *" -P "*) exec {cmake} "$@";; esac
for one in "$@"; do echo "$one" >> {said}; done
exit 1
"""


def arguments_of_setup(tmp_path: Path, home: Path, **changes: str) -> list[str]:
    """What setup.py configures with: a CMake that notes it, and stops there."""
    real, said = shutil.which("cmake"), tmp_path / "said"
    said.unlink(missing_ok=True)
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("cmake", CMAKE.format(cmake=real, said=said)), ("ninja", ""), ("make", "")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tools / "torch.py").touch()  # setup.py only asks whether there is one
    path = f"{tools}:{os.environ['PATH']}"
    built = {"MEMSWAP_BUILD_DIR": str(tmp_path / "built"), **changes}
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=ROOT,
        env=without_environment(home, PATH=path, PYTHONPATH=str(tools), **built),
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.exists(), done.stdout + done.stderr
    return said.read_text().splitlines()


def test_setup_takes_make_where_cmake_will_find_a_cann(tmp_path: Path, home: Path) -> None:
    assert "-GUnix Makefiles" in arguments_of_setup(tmp_path, home)
    assert "-GNinja" in arguments_of_setup(tmp_path, home, MEMSWAP_ASCEND="OFF")
    assert "-GNinja" in arguments_of_setup(tmp_path, tmp_path)
    cann = str(home / "Ascend" / "ascend-toolkit" / "latest")
    assert "-GUnix Makefiles" in arguments_of_setup(tmp_path, tmp_path, ASCEND_HOME_PATH=cann)
    # set_env.sh of a CANN that has been removed since.
    assert "-GNinja" in arguments_of_setup(tmp_path, tmp_path, ASCEND_HOME_PATH="/nowhere")
    named = arguments_of_setup(tmp_path, home, CMAKE_ARGS="-GNinja -DSOMETHING=1")
    assert named.count("-GNinja") == 1 and "-GUnix Makefiles" not in named


def test_setup_leaves_defaults_of_options_to_cmake(tmp_path: Path, home: Path) -> None:
    """What is not set is not what it was set to for an earlier build either."""
    said = arguments_of_setup(tmp_path, home, MEMSWAP_ASCEND="OFF")
    ours = {one for one in said if one[2:].startswith("MEMSWAP_")}
    unset = {f"-U{option}" for option in OPTIONS if option != "MEMSWAP_ASCEND"}
    assert ours == {"-DMEMSWAP_ASCEND=OFF", *unset}


def test_each_option_of_the_build_is_declared_once() -> None:
    declares = re.compile(
        r"^\s*(?:option\((MEMSWAP_\w+)|set\((MEMSWAP_\w+).*\bCACHE\b)", re.MULTILINE
    )
    folders = (ROOT / "kernels", ROOT / "third_party", ROOT / "csrc", ROOT / "tests" / "cpp")
    files = [path for one in folders for path in [*one.rglob("*.txt"), *one.rglob("*.cmake")]]
    text = "\n".join(path.read_text("utf-8") for path in [ROOT / "CMakeLists.txt", *files])
    found = ["".join(names) for names in declares.findall(text)]
    assert {"MEMSWAP_CUDA", "MEMSWAP_WERROR", "MEMSWAP_COMPILE_TOGETHER"} <= set(found)
    assert len(found) == len(set(found)), f"declared more than once: {sorted(found)}"


def test_setup_finds_a_cann_9_as_cmake_does(tmp_path: Path, cann_9: Path) -> None:
    made = arguments_of_setup(tmp_path, tmp_path, ASCEND_HOME_PATH=str(cann_9))
    assert "-GUnix Makefiles" in made


def test_a_build_folder_of_the_other_generator_is_made_anew(tmp_path: Path, home: Path) -> None:
    built = tmp_path / "built"
    built.mkdir()
    (built / "CMakeCache.txt").write_text("CMAKE_GENERATOR:INTERNAL=Ninja\n")
    assert "--fresh" in arguments_of_setup(tmp_path, home)
    assert "--fresh" not in arguments_of_setup(tmp_path, tmp_path)


@pytest.mark.skipif(shutil.which("ninja") is None, reason="ninja is not on PATH")
def test_under_ninja_the_codec_is_left_out_or_the_build_ends(tmp_path: Path, cann: Path) -> None:
    configured = configure(tmp_path / "auto", cann, generator="Ninja")
    assert configured.returncode == 0, configured.stderr
    assert "memswap: CANN ascendc, Ascend codec OFF" in configured.stdout
    refused = configure(tmp_path / "on", cann, "ON", generator="Ninja")
    assert refused.returncode != 0
    assert "CANN's kernels are built by make" in refused.stderr


@pytest.mark.parametrize("missing", ["include/acl/acl.h", "lib64/libascendcl.so"])
def test_a_cann_that_lacks_a_part_is_not_built_with(
    tmp_path: Path, cann: Path, missing: str
) -> None:
    (cann / missing).unlink()
    configured = configure(tmp_path / "auto", cann)
    assert configured.returncode == 0, configured.stderr
    assert "memswap: CANN ascendc, Ascend codec OFF" in configured.stdout
    refused = configure(tmp_path / "on", cann, "ON")
    assert refused.returncode != 0 and f"has no {missing}" in " ".join(refused.stderr.split())


def test_beside_torch_npu_a_missing_cann_is_one_line(tmp_path: Path) -> None:
    if Path("/usr/local/Ascend").exists():
        pytest.skip("this machine has a CANN of its own")
    stand_in = tmp_path / "shadow" / "torch"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").write_text("__version__ = '2.13.0'\nclass version: cuda = None\n")
    (tmp_path / "shadow" / "torch_npu.py").touch()
    build = tmp_path / "build"
    done = subprocess.run(
        [
            "cmake", f"-S{ROOT}", f"-B{build}", f"-DPython_EXECUTABLE={sys.executable}",
            "-DMEMSWAP_CUDA=OFF",
        ],
        env=without_environment(tmp_path, PYTHONPATH=str(stand_in.parent)),
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reason = (build / "generated" / "left_out.cpp").read_text()
    reason = reason.partition('{"npu", R"note(')[2].partition(')note"')[0]
    assert "no CANN was found" in reason and "set_env.sh" in reason and "\n" not in reason
    assert f"memswap: no Ascend codec in this build: {reason}" in done.stderr
