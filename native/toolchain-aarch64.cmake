# SPDX-License-Identifier: Apache-2.0
# Builds for 64-bit Arm, such as BlueField's cores, on another machine; tests run under qemu:
#   scripts/unpack-arm64 build/aarch64/libraries
#   cmake -S . -B build/aarch64/native -DCMAKE_TOOLCHAIN_FILE=native/toolchain-aarch64.cmake -DSHADOWSERVE_TESTS=ON
# The compiler is Debian's gcc-aarch64-linux-gnu, or with CC=clang that one, for the same C library. Set
# SHADOWSERVE_ARM64_LIBRARIES to where the packages were unpacked if that is elsewhere, and SHADOWSERVE_ARM64_CPU to the
# CPU that qemu is to be.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(SHADOWSERVE_ARM64_LIBRARIES "${CMAKE_CURRENT_LIST_DIR}/../build/aarch64/libraries" CACHE PATH
    "Where arm64 packages of the libraries are unpacked")
set(SHADOWSERVE_ARM64_CPU neoverse-n1 CACHE STRING "CPU that qemu is; neoverse-n1 has all instructions of Cortex-A78")
# CMake tries compilers in projects of their own, which must see the same.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES SHADOWSERVE_ARM64_LIBRARIES SHADOWSERVE_ARM64_CPU)

if("$ENV{CC}" MATCHES "clang")
    set(CMAKE_C_COMPILER "$ENV{CC}")
    set(CMAKE_C_COMPILER_TARGET aarch64-linux-gnu)
else()
    set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
endif()
find_program(SHADOWSERVE_QEMU qemu-aarch64)
if(SHADOWSERVE_QEMU)
    set(CMAKE_CROSSCOMPILING_EMULATOR
        "${SHADOWSERVE_QEMU};-cpu;${SHADOWSERVE_ARM64_CPU};-L;/usr/aarch64-linux-gnu")
endif()

# Libraries and headers come from the unpacked packages alone, programs such as Python from this machine.
get_filename_component(arm64_libraries "${SHADOWSERVE_ARM64_LIBRARIES}" ABSOLUTE)
set(CMAKE_FIND_ROOT_PATH "${arm64_libraries}" /usr/aarch64-linux-gnu)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
if(NOT DEFINED ENV{PKG_CONFIG_LIBDIR})
    set(ENV{PKG_CONFIG_LIBDIR} "${arm64_libraries}/usr/lib/aarch64-linux-gnu/pkgconfig")
endif()
# The packages' libraries need each other, and these folders are none that a cross linker looks into.
set(CMAKE_SHARED_LINKER_FLAGS_INIT "-Wl,-rpath-link,${arm64_libraries}/usr/lib/aarch64-linux-gnu")
set(CMAKE_EXE_LINKER_FLAGS_INIT "${CMAKE_SHARED_LINKER_FLAGS_INIT}")
