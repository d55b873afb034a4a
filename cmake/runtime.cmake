# libassay.so, which lives inside host processes, and libassay_offline.so, which reads and compares traces for Python.
set(ASSAY_SYMBOL_PREFIX "" CACHE STRING "Put before every exported symbol, so that two copies can share a process")

set(runtime_dir ${PROJECT_SOURCE_DIR}/src/runtime)
file(GLOB runtime_sources CONFIGURE_DEPENDS ${runtime_dir}/*.cpp)
set(offline_sources ${runtime_sources})
list(FILTER runtime_sources EXCLUDE REGEX "/offline_[^/]*$")
list(FILTER offline_sources INCLUDE REGEX "/offline_[^/]*$")

# A shared library of its own world: the C++ and compiler runtimes are linked in, and only the functions of its header
# are visible, so that no other copy of either in the process can be mixed up with them.
function(assay_shared_library target map)
  add_library(${target} SHARED ${ARGN})
  configure_file(${runtime_dir}/${map} ${PROJECT_BINARY_DIR}/${target}.map @ONLY)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
  target_link_options(${target} PRIVATE -static-libstdc++ -static-libgcc -Wl,--as-needed -Wl,--exclude-libs,ALL
    -Wl,--gc-sections -Wl,-z,nodelete -Wl,--version-script=${PROJECT_BINARY_DIR}/${target}.map)
  if(NOT ASSAY_SANITIZE)  # a sanitizer's run-time symbols come from the program
    target_link_options(${target} PRIVATE -Wl,-z,defs)
  endif()
  set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}
    LINK_DEPENDS ${PROJECT_BINARY_DIR}/${target}.map VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
endfunction()

assay_shared_library(assay_shared assay.map ${runtime_sources})
target_link_libraries(assay_shared PRIVATE assay_probe)
set_target_properties(assay_shared PROPERTIES OUTPUT_NAME assay EXPORT_NAME assay)
if(ASSAY_SYMBOL_PREFIX)
  target_compile_definitions(assay_shared PUBLIC ASSAY_SYMBOL_PREFIX=${ASSAY_SYMBOL_PREFIX})
endif()
add_library(assay::assay ALIAS assay_shared)

# GCC clears and copies a few hundred bytes by `rep stos` and `rep movs`, which take as long to begin as libc takes for
# all of them; what records a small tensor consists of such structs.
set(strategy unrolled_loop:64:noalign,libcall:-1:noalign)
check_cxx_compiler_flag("-mmemset-strategy=${strategy} -mmemcpy-strategy=${strategy}" ASSAY_HAS_STRATEGIES)
if(ASSAY_HAS_STRATEGIES)
  foreach(target assay_base assay_tensor assay_stats assay_sites assay_trace assay_probe assay_shared)
    target_compile_options(${target} PRIVATE -mmemset-strategy=${strategy} -mmemcpy-strategy=${strategy})
  endforeach()
endif()

assay_shared_library(assay_offline assay_offline.map ${offline_sources})
target_link_libraries(assay_offline PRIVATE assay_report)

if(ASSAY_INSTALL)
  include(GNUInstallDirs)
  include(CMakePackageConfigHelpers)
  set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/assay)
  install(TARGETS assay_shared EXPORT assay-targets COMPONENT library
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library NAMELINK_COMPONENT library)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/assay DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library)
  install(EXPORT assay-targets NAMESPACE assay:: FILE assay-config.cmake DESTINATION ${package_dir} COMPONENT library)
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/assay-config-version.cmake COMPATIBILITY SameMajorVersion)
  file(RELATIVE_PATH pc_to_include /x/${CMAKE_INSTALL_LIBDIR}/pkgconfig /x/${CMAKE_INSTALL_INCLUDEDIR})
  configure_file(${PROJECT_SOURCE_DIR}/cmake/assay.pc.in ${PROJECT_BINARY_DIR}/assay.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/assay-config-version.cmake DESTINATION ${package_dir} COMPONENT library)
  install(FILES ${PROJECT_BINARY_DIR}/assay.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT library)
endif()

# In a wheel: the libraries beside the package, the program among the scripts. No sonames there: nothing links to them.
if(SKBUILD)
  set_target_properties(assay_shared assay_offline PROPERTIES VERSION "" SOVERSION "")
  set_property(TARGET assay_shared assay_offline PROPERTY NO_SONAME ON)
  install(TARGETS assay_shared assay_offline LIBRARY DESTINATION assay/lib COMPONENT python)
  # What starts the attachment in a Python process (docs/attach.md); part of the wheel, so an uninstall removes it.
  install(FILES ${PROJECT_SOURCE_DIR}/python/assay-attach.pth
    ${PROJECT_SOURCE_DIR}/python/assay/attach/site_hook/_assay_site.py DESTINATION . COMPONENT python)
endif()
