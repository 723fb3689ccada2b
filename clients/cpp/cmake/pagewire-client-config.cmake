include(CMakeFindDependencyMacro)
find_dependency(Threads)
include("${CMAKE_CURRENT_LIST_DIR}/pagewire-dependencies.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/pagewire-client-targets.cmake")
