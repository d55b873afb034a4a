# Flags common to all targets. No -ffast-math anywhere: NaN checks would vanish. -ffp-contract=off: a fused
# multiply-add appears only where a kernel asks for one, so that results do not depend on the compiler.
include(CheckCXXCompilerFlag)

add_compile_options(-Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -ffp-contract=off -fno-math-errno)

if(ASSAY_WERROR)
  add_compile_options(-Werror)
  # These come from GCC's optimiser, not from the language: what they report changes with the compiler's version and
  # options, and they err. They stay visible as warnings.
  foreach(warning maybe-uninitialized array-bounds stringop-overflow stringop-overread restrict dangling-reference
                  free-nonheap-object nonnull)
    string(MAKE_C_IDENTIFIER "ASSAY_HAS_W_${warning}" known)
    check_cxx_compiler_flag(-Werror=${warning} ${known})
    if(${known})
      add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-error=${warning}>)
    endif()
  endforeach()
endif()

if(ASSAY_WERROR AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  # Newer ones report what std::stable_sort of GCC 12's library uses itself.
  add_compile_options(-Wno-error=deprecated-declarations)
endif()

if(ASSAY_SANITIZE)
  add_compile_options(-fsanitize=${ASSAY_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${ASSAY_SANITIZE})
endif()

if(ASSAY_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "ASSAY_FUZZ needs Clang: configure with -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

# Compiling the same source again is free with ccache.
find_program(ASSAY_CCACHE ccache)
mark_as_advanced(ASSAY_CCACHE)
if(ASSAY_CCACHE AND PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${ASSAY_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${ASSAY_CCACHE})
endif()
