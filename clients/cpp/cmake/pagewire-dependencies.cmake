# What the headers need: libzmq and its header for C++ (cppzmq), and msgpack-cxx. Found by their files, since Debian's
# packages of them bring configurations that ask for more than is needed (Boost, pkg-config).
if(NOT TARGET pagewire::dependencies)
    find_package(Threads REQUIRED)
    find_path(PAGEWIRE_ZMQ_INCLUDE zmq.hpp REQUIRED)
    find_path(PAGEWIRE_ZMQ_C_INCLUDE zmq.h REQUIRED)
    find_path(PAGEWIRE_MSGPACK_INCLUDE msgpack/unpack.hpp REQUIRED)
    find_library(PAGEWIRE_ZMQ_LIBRARY zmq REQUIRED)
    add_library(pagewire::dependencies INTERFACE IMPORTED)
    set_target_properties(pagewire::dependencies PROPERTIES
        INTERFACE_INCLUDE_DIRECTORIES "${PAGEWIRE_ZMQ_INCLUDE};${PAGEWIRE_ZMQ_C_INCLUDE};${PAGEWIRE_MSGPACK_INCLUDE}"
        INTERFACE_LINK_LIBRARIES "${PAGEWIRE_ZMQ_LIBRARY};Threads::Threads"
        INTERFACE_COMPILE_DEFINITIONS MSGPACK_NO_BOOST)
endif()
