# Everything our code links. All but llama.cpp come from the distribution's packages, which `./dev`
# installs; versions below are the oldest we build against (Debian 12).

find_package(Threads REQUIRED)
find_package(Boost 1.81 REQUIRED) # Asio, header only
find_package(nlohmann_json 3.11 REQUIRED)
find_package(fmt 9 REQUIRED)
find_package(yaml-cpp 0.7 REQUIRED)
find_package(OpenSSL 3.0 REQUIRED)
find_package(LibLZMA 5.2 REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(simdjson REQUIRED IMPORTED_TARGET simdjson)
pkg_check_modules(libb2 REQUIRED IMPORTED_TARGET libb2)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)

# Not by pkg-config, whose file names folders of libraries that libzmq itself was built with.
find_path(KINDRED_ZMQ_INCLUDE zmq.h REQUIRED)
find_library(KINDRED_ZMQ_LIBRARY zmq REQUIRED)
add_library(kindred_zmq INTERFACE)
target_include_directories(kindred_zmq SYSTEM INTERFACE "${KINDRED_ZMQ_INCLUDE}")
target_link_libraries(kindred_zmq INTERFACE "${KINDRED_ZMQ_LIBRARY}")

# Instead of the C library's malloc, which stands high in the profile of a relayed request. Sanitizers
# bring their own.
add_library(kindred_malloc INTERFACE)
if(NOT KINDRED_SANITIZE)
  find_library(KINDRED_MIMALLOC_LIBRARY mimalloc REQUIRED)
  target_link_libraries(kindred_malloc INTERFACE "${KINDRED_MIMALLOC_LIBRARY}")
endif()

# Asio is compiled once, in src/net/asio.cpp, not in every file that includes it.
add_library(kindred_asio INTERFACE)
# Asio keeps this many freed coroutine frames for the next ones; its 2 are fewer than a request has at a time. Larger
# frames come from `new`, which is far quicker than the C library's aligned_alloc() and aligns as well.
target_compile_definitions(kindred_asio INTERFACE BOOST_ASIO_SEPARATE_COMPILATION BOOST_ASIO_NO_DEPRECATED
                                                  BOOST_ASIO_RECYCLING_ALLOCATOR_CACHE_SIZE=16
                                                  BOOST_ASIO_DISABLE_STD_ALIGNED_ALLOC BOOST_ASIO_DISABLE_BOOST_ALIGN)
target_link_libraries(kindred_asio INTERFACE Boost::headers Threads::Threads)

# Optional: the mixed-integer solver behind `kindred place --solver exact`.
if(KINDRED_EXACT)
  find_path(KINDRED_HIGHS_INCLUDE highs/interfaces/highs_c_api.h HINTS "${KINDRED_HIGHS_DIR}/include")
  find_library(KINDRED_HIGHS_LIBRARY highs HINTS "${KINDRED_HIGHS_DIR}/lib")
  if(KINDRED_HIGHS_INCLUDE AND KINDRED_HIGHS_LIBRARY)
    set(KINDRED_HAVE_HIGHS ON)
    add_library(kindred_highs INTERFACE)
    # Its headers include each other as if include/highs were on the path too.
    target_include_directories(kindred_highs SYSTEM INTERFACE "${KINDRED_HIGHS_INCLUDE}"
                                                              "${KINDRED_HIGHS_INCLUDE}/highs")
    target_link_libraries(kindred_highs INTERFACE "${KINDRED_HIGHS_LIBRARY}")
  else()
    message(STATUS "HiGHS not found: `kindred place --solver exact` will say that it is not there")
  endif()
endif()

# Optional: gRPC, for `kindred picker`.
if(KINDRED_PICKER)
  pkg_check_modules(grpcpp IMPORTED_TARGET grpc++>=1.51)
  pkg_check_modules(protobuf IMPORTED_TARGET protobuf>=3.21)
  find_program(KINDRED_PROTOC protoc)
  find_program(KINDRED_GRPC_PLUGIN grpc_cpp_plugin)
  if(grpcpp_FOUND AND protobuf_FOUND AND KINDRED_PROTOC AND KINDRED_GRPC_PLUGIN)
    set(KINDRED_HAVE_PICKER ON)
    add_library(kindred_grpc INTERFACE)
    target_link_libraries(kindred_grpc INTERFACE PkgConfig::grpcpp PkgConfig::protobuf)
  else()
    message(STATUS "gRPC or protobuf not found: `kindred picker` will say that it is not there")
  endif()
endif()

if(KINDRED_TESTS)
  find_package(GTest REQUIRED)
  include(GoogleTest)
endif()

if(KINDRED_ENGINE)
  add_subdirectory(cmake/llama)
endif()
