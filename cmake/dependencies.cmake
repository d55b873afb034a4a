# Libraries are found, never fetched; docs/dependencies.md says why each is here. libassay itself needs libc and
# threads alone.
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(nlohmann_json 3.10 REQUIRED)
if(ASSAY_CLI)
  find_package(CLI11 2.1 REQUIRED)
  find_package(fmt 9.0 REQUIRED)
  # The library that is found here is this machine's.
  set(ASSAY_FMT $<IF:$<BOOL:${CMAKE_CROSSCOMPILING}>,fmt::fmt-header-only,fmt::fmt>)
endif()
# GEMM of the native runtime. Absent: a plain loop, slower, same results within the stated bound.
find_library(ASSAY_OPENBLAS_LIBRARY openblas)
find_path(ASSAY_OPENBLAS_INCLUDE cblas.h PATH_SUFFIXES openblas openblas-pthread)
mark_as_advanced(ASSAY_OPENBLAS_LIBRARY ASSAY_OPENBLAS_INCLUDE)
if(ASSAY_TESTS)
  find_package(GTest 1.12 REQUIRED)
endif()
if(ASSAY_BENCH)
  find_package(benchmark 1.7 REQUIRED)
endif()
