// How the client greets, and how often it tries to connect.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.hpp"
#include "server.hpp"

namespace {

using namespace pagewire;
using namespace std::chrono_literals;
using detail::Core;
using test::Asked;
using test::Reply;
using test::Server;
using Clock = std::chrono::steady_clock;

template <typename Condition>
void until(Condition condition) {
    for (int i = 0; !condition(); ++i) {
        if (i > 2000) throw std::runtime_error("timed out");
        std::this_thread::sleep_for(5ms);
    }
}

// A port of the loopback that takes connections and closes them at once, as a proxy does that has nobody behind it.
class HangsUp {
  public:
    HangsUp() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
        sockaddr_in address{};
        address.sin_family = AF_INET, address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof address;
        if (bind(socket_, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(socket_, 9) != 0 ||
            getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
            throw std::runtime_error("no port can be had");
        }
        url = "tcp://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
        thread_ = std::thread([this] {
            for (int taken; (taken = accept(socket_, nullptr, nullptr)) >= 0; ::close(taken)) {
                std::lock_guard lock(mutex_);
                calls_.push_back(Clock::now());
            }
        });
    }
    ~HangsUp() {
        shutdown(socket_, SHUT_RDWR);
        thread_.join();
        ::close(socket_);
    }

    std::vector<Clock::time_point> calls() {
        std::lock_guard lock(mutex_);
        return calls_;
    }
    std::string url;

  private:
    const int socket_;
    std::mutex mutex_;
    std::vector<Clock::time_point> calls_;
    std::thread thread_;
};

const test::Test pauses("pauses double and are drawn from their upper half", [] {
    for (const double chance : {0.0, 0.5, 1.0}) {
        detail::Backoff backoff([=] { return chance; });
        const double share = 0.5 + 0.5 * chance;
        for (int round = 0; round < 2; ++round) {
            for (const int wanted : {0, 50, 100, 200, 400, 800, 1600, 2000, 2000}) {
                EQUAL(backoff.next().count(), static_cast<long>(wanted * share));
            }
            backoff.reset();
        }
        EQUAL(backoff.own_retries().second.count(), static_cast<long>(2000 * share));
    }
});

const test::Test greeting("a hello is said again only when the one before was refused", [] {
    Server server([](const Asked&, const Reply&) {});
    server.shut();
    server.greeting = [](int number) {
        detail::MapWriter map = detail::message("error");
        map.field("code", std::string("unavailable")), map.field("message", std::string("starting"));
        map.field("retry_after_ms", std::int64_t{1000});
        return number == 0 ? map.frame() : std::string();
    };
    server.open();
    Core core(server.url, "test", std::nullopt, 1000ms);
    until([&] { return server.seen().size() == 2; });
    std::this_thread::sleep_for(1500ms);  // more than a heartbeat
    EQUAL(server.seen().size(), 2u);
});

const test::Test anew("a second welcome is another connection as far as streams go", [] {
    std::atomic<int> num_hellos{0};
    Server server([&](const Asked& asked, const Reply& reply) {
        if (asked.t == "hello" && num_hellos++ == 0) reply(Server::welcome().frame());
    });
    Core core(server.url, "test", std::nullopt, 1000ms);
    until([&] { return num_hellos == 2; });
    core.wait_welcome(5000ms);
});

const test::Test hung_up("a server that hangs up at once is not called in a tight loop", [] {
    HangsUp proxy;
    Core core(proxy.url, "test", std::nullopt, 1000ms);
    THROWS(Unauthorized, core.wait_welcome(10000ms));  // four without a word are a refusal
    const auto calls = proxy.calls();
    EQUAL(calls.size(), 4u);
    for (std::size_t i = 0; i + 1 < calls.size(); ++i) CHECK(calls[i + 1] - calls[i] >= 22ms * (1 << i));
});

const test::Test waits("what is sent waits for the server that comes", [] {
    Server server([](const Asked&, const Reply&) {});
    server.shut();
    Core core(server.url, "test", std::nullopt, 1000ms);
    {
        detail::Lock lock(core.mutex);
        core.send(detail::message("cancel", 7).frame());
    }
    std::this_thread::sleep_for(100ms);
    server.open();
    until([&] { return server.seen().size() == 2; });
    EQUAL(server.seen()[0].t, "hello");
    EQUAL(server.seen()[1].stream, 7u);
});

}  // namespace
