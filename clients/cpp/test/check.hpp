// As much of a test framework as is needed here.
#pragma once

#include <exception>
#include <functional>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace test {

inline std::vector<std::pair<std::string, std::function<void()>>>& all() {
    static std::vector<std::pair<std::string, std::function<void()>>> tests;
    return tests;
}

struct Test {
    Test(std::string name, std::function<void()> body) { all().emplace_back(std::move(name), std::move(body)); }
};

struct Skipped {
    std::string why;
};

// The outcome of each, a line each; how many failed.
inline int run_all() {
    int num_failed = 0;
    for (const auto& [name, body] : all()) {
        std::string outcome = "ok      ";
        std::string why;
        try {
            body();
        } catch (const Skipped& skipped) {
            outcome = "skipped ", why = ": " + skipped.why;
        } catch (const std::exception& error) {
            outcome = "FAILED  ", why = std::string(": ") + error.what();
            ++num_failed;
        }
        std::cout << outcome << name << why << std::endl;
    }
    std::cout << all().size() << " tests, " << num_failed << " failed" << std::endl;
    return num_failed;
}

template <typename A, typename B>
void equal(const A& is, const B& wanted, const char* what, int line) {
    if (is == wanted) return;
    std::ostringstream text;
    text << "line " << line << ": " << what << " is " << is << ", wanted " << wanted;
    throw std::runtime_error(text.str());
}

template <typename Expected>
Expected thrown(const std::function<void()>& call, int line) {
    try {
        call();
    } catch (const Expected& error) {
        return error;
    }
    throw std::runtime_error("line " + std::to_string(line) + ": nothing was thrown");
}

}  // namespace test

#define EQUAL(is, wanted) ::test::equal((is), (wanted), #is, __LINE__)
#define CHECK(what) ::test::equal(static_cast<bool>(what), true, #what, __LINE__)
#define THROWS(Expected, ...) ::test::thrown<Expected>([&] { (void)(__VA_ARGS__); }, __LINE__)
