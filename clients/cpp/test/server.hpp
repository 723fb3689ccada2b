// A server that a test plays: it says what it is told to say.
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pagewire/client.hpp>

namespace test {

using pagewire::detail::MapWriter;
using pagewire::detail::message;
using pagewire::detail::pack_ids;

struct Asked {
    std::string t, prompt, request_id, resume_key, received;
    std::uint32_t stream = 0;
};
using Reply = std::function<void(const std::string& frame)>;
using Handler = std::function<void(const Asked&, const Reply&)>;

inline std::pair<std::string, std::string> curve_pair() {
    char public_key[41], secret_key[41];
    zmq_curve_keypair(public_key, secret_key);
    return {public_key, secret_key};
}

class Server {
  public:
    explicit Server(Handler handler, bool has_keys = false) : handler_(std::move(handler)), has_keys_(has_keys) {
        char name[] = "/tmp/pw-XXXXXX";
        if (mkdtemp(name) == nullptr) throw std::runtime_error("no temporary folder");
        folder_ = name, url = "ipc://" + folder_ + "/s";
        open();
    }
    ~Server() {
        shut();
        std::filesystem::remove_all(folder_);
    }

    std::string url;
    const std::pair<std::string, std::string> keys = curve_pair();
    // The answer to the hello of this number, from 0 on; "": none. Set before `open`.
    std::function<std::string(int)> greeting = [](int) { return welcome().frame(); };

    void open() {
        is_open_ = true;
        socket_ = zmq::socket_t(context_, zmq::socket_type::router);
        socket_.set(zmq::sockopt::linger, 0);
        if (has_keys_) {
            socket_.set(zmq::sockopt::curve_server, true);
            socket_.set(zmq::sockopt::curve_secretkey, keys.second.c_str());
        }
        socket_.bind(url);
        thread_ = std::thread([this] { run(); });
    }

    // Cut every connection, and be gone.
    void shut() {
        is_open_ = false;
        if (thread_.joinable()) thread_.join();
        socket_.close();
    }

    std::vector<Asked> seen() {
        std::lock_guard lock(mutex_);
        return seen_;
    }

    static MapWriter welcome() {
        MapWriter map = message("welcome");
        const std::map<std::string, std::int64_t> numbers{
            {"version", 1}, {"vocab_size", 9}, {"max_model_len", 99}, {"max_streams", 9}, {"max_message_bytes", 1 << 20},
            {"heartbeat_ms", 50}, {"heartbeat_timeout_ms", 1000}};
        for (const auto& [name, value] : numbers) map.field(name, value);
        map.field("role", std::string("gateway")), map.field("server", std::string("test")), map.field("model", std::string("m"));
        return map;
    }

  private:
    static Asked read(const zmq::message_t& frame) {
        std::size_t at = 1;
        const auto handle = msgpack::unpack(static_cast<const char*>(frame.data()), frame.size(), at);
        const pagewire::detail::Fields fields(handle.get());
        Asked asked;
        fields.get("t", asked.t), fields.maybe("stream", asked.stream), fields.maybe("prompt", asked.prompt);
        fields.maybe("request_id", asked.request_id), fields.maybe("resume_key", asked.resume_key);
        fields.maybe_bytes("received", asked.received);
        return asked;
    }

    void run() {
        zmq::message_t peer, frame;
        socket_.set(zmq::sockopt::rcvtimeo, 10);
        while (is_open_) {
            if (!socket_.recv(peer)) continue;
            (void)socket_.recv(frame);
            const Asked asked = read(frame);
            const auto reply = [&](const std::string& bytes) {
                socket_.send(zmq::buffer(peer.data(), peer.size()), zmq::send_flags::sndmore);
                socket_.send(zmq::buffer(bytes));
            };
            if (asked.t == "hello") {
                if (const std::string answer = greeting(num_hellos_++); !answer.empty()) reply(answer);
            }
            if (asked.t == "ping") reply(message("pong").frame());
            if (asked.t != "ping") {
                std::lock_guard lock(mutex_);
                seen_.push_back(asked);
            }
            handler_(asked, reply);
        }
    }

    const Handler handler_;
    const bool has_keys_;
    std::string folder_;
    zmq::context_t context_{1};
    zmq::socket_t socket_;
    std::atomic<bool> is_open_{false};
    int num_hellos_ = 0;
    std::mutex mutex_;
    std::vector<Asked> seen_;
    std::thread thread_;
};

// Tokens of one stream: those from `start` on whose texts are `words`; the ids are 100, 101, ….
inline std::string tokens(std::uint32_t stream, std::uint32_t start, const std::vector<std::string>& words) {
    std::vector<std::uint32_t> ids;
    std::string text;
    for (const auto& word : words) ids.push_back(100 + start + static_cast<std::uint32_t>(ids.size())), text += word;
    MapWriter map = message("tokens");
    map.bytes("streams", pack_ids({stream})), map.bytes("starts", pack_ids({start})), map.bytes("ids", pack_ids(ids));
    map.bytes("counts", pack_ids({static_cast<std::uint32_t>(ids.size())}).substr(0, 2));
    map.list("texts", std::vector<std::string>{text}, [&](const std::string& item) { map.put(item); });
    return map.frame();
}

inline std::string accepted(std::uint32_t stream, const std::string& key = "") {
    MapWriter map = message("accepted", stream);
    map.field("request_id", std::string("r1")), map.field("seed", std::uint64_t{9223372036854775807u});
    map.field("num_prompt_tokens", std::int64_t{3}), map.field("max_tokens", std::int64_t{9}), map.field("resume_key", key);
    return map.frame();
}

inline std::string finished(std::uint32_t stream, std::int64_t num_tokens, const std::string& reason = "length") {
    MapWriter map = message("finished", stream);
    map.field("reason", reason), map.field("num_tokens", num_tokens);
    return map.frame();
}

inline std::string done(std::uint32_t stream, std::int64_t completion) {
    MapWriter map = message("done", stream), usage, timings;
    usage.field("prompt", std::int64_t{3}), usage.field("completion", completion);
    for (const char* name : {"queue_ns", "first_token_ns", "total_ns"}) timings.field(name, std::int64_t{1000});
    map.field("seed", std::uint64_t{9223372036854775807u}), map.field("usage", usage), map.field("timings", timings);
    return map.frame();
}

inline std::string error(const std::string& code, std::uint32_t stream, const std::string& field = "", std::int64_t retry = 0) {
    MapWriter map = message("error", stream);
    map.field("code", code), map.field("message", std::string("no"));
    if (!field.empty()) map.field("field", field);
    if (retry != 0) map.field("retry_after_ms", retry);
    return map.frame();
}

}  // namespace test
