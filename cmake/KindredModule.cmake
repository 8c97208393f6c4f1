# kindred_module(<name> SOURCES ... TESTS ... DEPENDS ... [LIBRARIES ...])
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
                                                   -Wno-stringop-overflow -Wno-array-bounds)
endif()
if(KINDRED_SANITIZE)
  target_compile_options(kindred_options INTERFACE -fsanitize=${KINDRED_SANITIZE} -fno-omit-frame-pointer
                                                   -fno-sanitize-recover=all -Wno-tsan)
  target_link_options(kindred_options INTERFACE -fsanitize=${KINDRED_SANITIZE})
endif()

function(kindred_module name)
  cmake_parse_arguments(arg "" "" "SOURCES;TESTS;DEPENDS;LIBRARIES" ${ARGN})
  list(TRANSFORM arg_DEPENDS PREPEND kindred_)
  add_library(kindred_${name} STATIC ${arg_SOURCES})
  target_link_libraries(kindred_${name} PUBLIC kindred_options ${arg_DEPENDS} ${arg_LIBRARIES})
  if(KINDRED_TESTS AND arg_TESTS)
    add_executable(${name}_test ${arg_TESTS})
    target_link_libraries(${name}_test PRIVATE kindred_${name} GTest::gtest_main)
    target_compile_definitions(${name}_test PRIVATE KINDRED_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
    gtest_discover_tests(${name}_test TEST_PREFIX "${name}." DISCOVERY_TIMEOUT 60
                         PROPERTIES TIMEOUT 300)
  endif()
endfunction()
