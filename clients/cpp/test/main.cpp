#include "check.hpp"

int main() { return test::run_all() == 0 ? 0 : 1; }
