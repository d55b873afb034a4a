# The C host in a folder of its own, without any setting from outside.
file(REMOVE_RECURSE ${SCRATCH})
file(MAKE_DIRECTORY ${SCRATCH})
execute_process(COMMAND ${CMAKE_COMMAND} -E env --unset=ASSAY ${HOST} ${SCRATCH}/trace
  RESULT_VARIABLE code OUTPUT_VARIABLE out ERROR_VARIABLE err)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "c11_host ended with ${code}\n${out}${err}")
endif()
if(out OR err)
  message(FATAL_ERROR "the library printed:\n${out}${err}")
endif()
file(REMOVE_RECURSE ${SCRATCH})
