# kindred_module(<name> SOURCES ... TESTS ... DEPENDS ... [LIBRARIES ...] [NO_UNITY])
#
# One static library per module and one test binary beside it. DEPENDS names modules that stand
# above this one in the order of dependence (ARCHITECTURE.md); nothing else may be included.

add_library(kindred_options INTERFACE)
target_include_directories(kindred_options INTERFACE "${CMAKE_SOURCE_DIR}/src")
target_compile_options(kindred_options INTERFACE -Wall -Wextra -Werror -Wshadow -Wnon-virtual-dtor
                                                 -Woverloaded-virtual)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Known false positives of g++ 12 inside libstdc++ when coroutines are optimised.
  target_compile_options(kindred_options INTERFACE -Wno-maybe-uninitialized -Wno-restrict
                                                   -Wno-stringop-overflow -Wno-array-bounds
                                                   -Wno-mismatched-new-delete)
endif()
if(KINDRED_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # An unnamed namespace of a .cpp that is included by another looks like one in a header.
  target_compile_options(kindred_options INTERFACE -Wno-subobject-linkage)
endif()
if(KINDRED_SANITIZE)
  target_compile_options(kindred_options INTERFACE -fsanitize=${KINDRED_SANITIZE} -fno-omit-frame-pointer
                                                   -fno-sanitize-recover=all
                                                   $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
  target_link_options(kindred_options INTERFACE -fsanitize=${KINDRED_SANITIZE})
endif()

# Most of the time to compile a file goes into the headers of Asio and the standard library, so files
# of a target are compiled together: far less time for the whole, more for a single change.
function(kindred_unity target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${KINDRED_UNITY} UNITY_BUILD_BATCH_SIZE 10)
endfunction()

# A test binary <name>_test, whose cases CTest calls <name>.<suite>.<case>.
function(kindred_test name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBRARIES" ${ARGN})
  add_executable(${name}_test ${arg_SOURCES})
  target_link_libraries(${name}_test PRIVATE ${arg_LIBRARIES} GTest::gtest_main)
  # Tests are compiled often and run once.
  target_compile_options(${name}_test PRIVATE $<$<CONFIG:Release>:-O0>)
  if(KINDRED_UNITY)
    # GoogleTest's header is more than half of what compiling a small test costs. ccache wants the option to
    # keep what was compiled with it (and CCACHE_SLOPPINESS, which ./dev sets).
    target_precompile_headers(${name}_test PRIVATE <gtest/gtest.h>)
    target_compile_options(${name}_test PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
  endif()
  target_compile_definitions(${name}_test PRIVATE KINDRED_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  gtest_discover_tests(${name}_test TEST_PREFIX "${name}." DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
endfunction()

function(kindred_module name)
  cmake_parse_arguments(arg "NO_UNITY" "" "SOURCES;TESTS;DEPENDS;LIBRARIES" ${ARGN})
  list(TRANSFORM arg_DEPENDS PREPEND kindred_)
  add_library(kindred_${name} STATIC ${arg_SOURCES})
  if(NOT arg_NO_UNITY)
    kindred_unity(kindred_${name})
  endif()
  target_link_libraries(kindred_${name} PUBLIC kindred_options ${arg_DEPENDS} ${arg_LIBRARIES})
  if(KINDRED_TESTS AND arg_TESTS)
    kindred_test(${name} SOURCES ${arg_TESTS} LIBRARIES kindred_${name})
  endif()
endfunction()
