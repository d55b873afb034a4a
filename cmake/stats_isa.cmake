# Vector kernels: one file an instruction set, each compiled with its own flags and chosen at run time. Elsewhere than on
# x86-64 the portable kernel is the only one.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set_source_files_properties(${PROJECT_SOURCE_DIR}/src/stats/kernel_avx2.cpp PROPERTIES
    COMPILE_OPTIONS "-mavx2;-mfma;-mf16c;-mpopcnt")
  set_source_files_properties(${PROJECT_SOURCE_DIR}/src/stats/kernel_avx512.cpp PROPERTIES
    COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx2;-mfma;-mf16c;-mpopcnt;-mprefer-vector-width=512")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC 12 takes the undefined pass-through operand of its own intrinsics for an uninitialised variable.
    set_property(SOURCE ${PROJECT_SOURCE_DIR}/src/stats/kernel_avx512.cpp APPEND PROPERTY
      COMPILE_OPTIONS "-Wno-uninitialized;-Wno-maybe-uninitialized")
  endif()
  target_compile_definitions(assay_stats PRIVATE ASSAY_HAVE_AVX2=1 ASSAY_HAVE_AVX512=1)
endif()
