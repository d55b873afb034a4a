# One static library a folder of src/. The second list is all that the folder may include (tests/base/test_layers
# checks the same table against the sources).
function(assay_layer name)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${name}/*.cpp)
  add_library(assay_${name} STATIC ${sources} ${PROJECT_SOURCE_DIR}/cmake/empty.cpp)
  target_include_directories(assay_${name} PUBLIC ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
  target_link_libraries(assay_${name} PUBLIC Threads::Threads)
  foreach(dep IN LISTS ARGN)
    target_link_libraries(assay_${name} PUBLIC assay_${dep})
  endforeach()
endfunction()

assay_layer(base)
assay_layer(tensor base)
assay_layer(stats tensor base)
assay_layer(io tensor base)
target_link_libraries(assay_io PUBLIC nlohmann_json::nlohmann_json)
assay_layer(sites base)
assay_layer(trace stats tensor base)
assay_layer(probe trace sites stats tensor base)
assay_layer(compare trace sites stats tensor base)
assay_layer(model probe trace sites stats io tensor base)
assay_layer(report compare trace sites io stats tensor base)

if(ASSAY_OPENBLAS_LIBRARY AND ASSAY_OPENBLAS_INCLUDE)
  target_compile_definitions(assay_model PRIVATE ASSAY_HAVE_BLAS=1)
  target_include_directories(assay_model SYSTEM PRIVATE ${ASSAY_OPENBLAS_INCLUDE})
  target_link_libraries(assay_model PUBLIC ${ASSAY_OPENBLAS_LIBRARY})
endif()

include(${CMAKE_CURRENT_LIST_DIR}/stats_isa.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/runtime.cmake)

if(ASSAY_CLI)
  file(GLOB cli_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cli/*.cpp)
  # The description of the host process is libassay's own.
  add_executable(assay ${cli_sources} ${PROJECT_SOURCE_DIR}/src/runtime/process_info.cpp)
  target_link_libraries(assay PRIVATE assay_report assay_compare assay_model assay_probe CLI11::CLI11 fmt::fmt)
  set_target_properties(assay PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
  if(ASSAY_INSTALL)
    install(TARGETS assay RUNTIME)
  endif()
  if(SKBUILD)  # a wheel
    install(TARGETS assay RUNTIME DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT python)
  endif()
endif()

# What `make build` makes: the program and the libraries beside it, without tests.
add_custom_target(products)
foreach(product assay assay_shared assay_offline)
  if(TARGET ${product})
    add_dependencies(products ${product})
  endif()
endforeach()
