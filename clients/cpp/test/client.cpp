// The client against a server that the test plays; with `PAGEWIRE_URL=ipc://…` also against a real one that serves the
// demo model, and with `PAGEWIRE_CURVE_URL`, `PAGEWIRE_SERVER_KEY` and `PAGEWIRE_KEY_FILE` against one that asks for keys.

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <pagewire/client.hpp>

#include "check.hpp"
#include "server.hpp"

namespace {

using namespace pagewire;
using namespace std::chrono_literals;
using test::accepted;
using test::Asked;
using test::done;
using test::finished;
using test::Reply;
using test::Server;
using test::tokens;

ConnectOptions within(std::chrono::milliseconds timeout) {
    ConnectOptions options;
    options.timeout = timeout;
    return options;
}

const test::Test chunks("chunks and result", [] {
    Server server([](const Asked& asked, const Reply& reply) {
        if (asked.t != "generate") return;
        reply(accepted(asked.stream));
        reply(tokens(asked.stream, 0, {"a", "b"}));
        reply(tokens(asked.stream, 2, {"ü"}));
        reply(finished(asked.stream, 3));
        reply(done(asked.stream, 3));
    });
    Client client = connect(server.url);
    EQUAL(client.info().model, "m");
    CHECK(client.is_ready());
    std::string text;
    Stream stream = client.generate("hi");
    for (const Chunk& chunk : stream) text += chunk.text;
    EQUAL(text, "abü");
    const Result result = stream.result();
    EQUAL(result.text, text);
    CHECK(result.token_ids == std::vector<std::uint32_t>({100, 101, 102}));
    EQUAL(result.finish_reason, "length");
    EQUAL(result.usage.completion, 3);
    EQUAL(result.seed, 9223372036854775807u);
    CHECK(result.timings.ttft_ns && result.timings.itl_p50_ns && result.timings.total_ns > 0);
    EQUAL(result.request_id, "r1");
});

const test::Test leaving("leaving the loop cancels", [] {
    Server server([](const Asked& asked, const Reply& reply) {
        if (asked.t == "generate") {
            reply(accepted(asked.stream));
            reply(tokens(asked.stream, 0, {"a"}));
        } else if (asked.t == "cancel") {
            reply(finished(asked.stream, 1, "cancelled"));
            reply(done(asked.stream, 1));
        }
    });
    Client client = connect(server.url);
    for (const Chunk& chunk : client.generate("one")) {
        EQUAL(chunk.text, "a");
        break;
    }
    Stream other = client.generate("two");
    other.cancel();
    EQUAL(other.result().finish_reason, "cancelled");
    int num_cancels = 0;
    for (const Asked& asked : server.seen()) num_cancels += asked.t == "cancel";
    EQUAL(num_cancels, 2);
});

const test::Test errors("errors have a class, a code, the field, and when to try again", [] {
    Server server([](const Asked& asked, const Reply& reply) {
        if (asked.t != "generate") return;
        if (asked.prompt == "field") reply(test::error("invalid_request", asked.stream, "params.max_tokens"));
        if (asked.prompt == "new") reply(test::error("of_tomorrow", asked.stream));
        if (asked.prompt != "full") return;
        reply(accepted(asked.stream));
        reply(tokens(asked.stream, 0, {"a"}));
        reply(test::error("overloaded", asked.stream, "", 70));
    });
    Client client = connect(server.url);
    const auto invalid = THROWS(InvalidRequest, client.generate("field").result());
    EQUAL(invalid.code(), "invalid_request");
    EQUAL(invalid.field().value(), "max_tokens");
    EQUAL(std::string(invalid.what()), "max_tokens: no");
    EQUAL(THROWS(Error, client.generate("new").result()).code(), "of_tomorrow");
    Stream stream = client.generate("full");
    EQUAL(stream.next()->text, "a");  // what came before the error can be read
    EQUAL(THROWS(Overloaded, stream.next()).retry_after_ms().value(), 70);
    EQUAL(THROWS(InvalidRequest, client.generate(std::string("\xff"))).field().value(), "prompt");
    EQUAL(THROWS(InvalidRequest, client.generate(std::string(1 << 20, 'x'))).field().value(), "prompt");
});

const test::Test resuming("a stream goes on after its connection broke: nothing lost, nothing doubled", [] {
    int num_resumes = 0;
    Server server([&](const Asked& asked, const Reply& reply) {
        if (asked.t == "generate") {
            reply(accepted(asked.stream, "key"));
            reply(tokens(asked.stream, 0, {"a", "b", "c"}));
        } else if (asked.t == "resume") {
            if (num_resumes++ == 0) return reply(test::error("unavailable", asked.stream, "", 30));
            std::vector<std::string> words{"a", "b", "c", "d", "e"};
            const auto from = static_cast<unsigned char>(asked.received[0]);
            words.erase(words.begin(), words.begin() + from);
            reply(accepted(asked.stream, asked.resume_key));
            reply(tokens(asked.stream, from, words));
            reply(finished(asked.stream, 5));
            reply(done(asked.stream, 5));
        }
    });
    Client client = connect(server.url);
    Stream stream = client.generate("hi");
    std::string text;
    for (const Chunk& chunk : stream) {
        text += chunk.text;
        if (text != "abc") continue;
        server.shut();
        server.open();
    }
    EQUAL(text, "abcde");
    CHECK(stream.result().token_ids == std::vector<std::uint32_t>({100, 101, 102, 103, 104}));
    const Result rest = client.resume({"r1", "key", {4}}).result();
    EQUAL(rest.text, "e");
    EQUAL(rest.token_ids.size(), 1u);
});

const test::Test ended("an end that the user found reaches the server over the next connection", [] {
    Server server([](const Asked& asked, const Reply& reply) {
        if (asked.t == "generate") {
            reply(accepted(asked.stream, "key"));
            reply(tokens(asked.stream, 0, {"a", "b", "c"}));
        } else if (asked.t == "resume") {
            reply(accepted(asked.stream, "key"));
        } else if (asked.t == "finish") {
            reply(finished(asked.stream, 2));
            reply(done(asked.stream, 2));
        }
    });
    Client client = connect(server.url);
    Stream stream = client.generate("hi");
    for (const Chunk& chunk : stream) {
        if (chunk.text != "abc") continue;
        server.shut();
        stream.finish(2);
        stream.finish(2, 1);  // is none
        server.open();
    }
    CHECK(stream.result().token_ids == std::vector<std::uint32_t>({100, 101}));
});

const test::Test lost("a stream that cannot go on ends with ConnectionLost, and the next one works", [] {
    Server server([](const Asked& asked, const Reply& reply) {
        if (asked.t == "resume") reply(test::error("unknown_stream", asked.stream, "request_id"));
        if (asked.t != "generate") return;
        if (asked.prompt == "nonsense") return reply("\1\xc1");
        if (asked.prompt == "gap") return reply(tokens(asked.stream, 3, {"x"}));
        reply(accepted(asked.stream, asked.prompt));
        if (asked.prompt != "short") return;
        reply(finished(asked.stream, 0));
        reply(done(asked.stream, 0));
    });
    Client client = connect(server.url);
    Stream one = client.generate(""), two = client.generate("forgotten");
    while (!two.ticket()) std::this_thread::sleep_for(5ms);
    server.shut();
    server.open();
    THROWS(ConnectionLost, one.result());
    THROWS(ConnectionLost, two.result());
    THROWS(ConnectionLost, client.generate("nonsense").result());
    THROWS(ProtocolError, client.generate("gap").result());
    EQUAL(client.generate("short").result().finish_reason, "length");
    Stream left = client.generate("open");
    client.close();
    THROWS(ConnectionLost, left.result());
});

const test::Test curve("CURVE", [] {
    Server server([](const Asked&, const Reply&) {}, true);
    const auto [public_key, secret_key] = test::curve_pair();
    ConnectOptions options;
    options.curve = CurveKeys{server.keys.first, public_key, secret_key};
    EQUAL(connect(server.url, options).info().server, "test");
    THROWS(Unauthorized, connect(server.url));
    options.curve->server_key = test::curve_pair().first;
    THROWS(Unauthorized, connect(server.url, options));
    options.curve->server_key = "short";
    EQUAL(THROWS(ConfigError, connect(server.url, options)).field().value(), "curve");
});

const test::Test nobody("nobody there", [] {
    THROWS(ConnectionLost, connect("ipc:///nowhere/at.all"));
    THROWS(ConnectionLost, connect("ipc:///nowhere/at.all", within(50ms)));
    THROWS(ConfigError, connect("http://localhost", within(50ms)));
    EQUAL(detail::json_value(R"({"name":"public", "public": "a\"b","pid":12})", "public").value(), "a\"b");
    EQUAL(detail::json_value(R"({"name":"public", "public": "a\"b","pid":12})", "pid").value(), "12");
});

// ---- a real server --------------------------------------------------------------------------------------------------

std::string live(const std::string& name = "PAGEWIRE_URL") {
    const char* url = std::getenv(name.c_str());
    if (url == nullptr || *url == '\0') throw test::Skipped{name + " names no server"};
    return url;
}

Options short_options() {
    Options options;
    options.max_tokens = 4, options.seed = 7, options.ignore_eos = true;
    return options;
}

const test::Test live_text("live: chat, text, token ids, log-probabilities, several streams", [] {
    Client client = connect(live());
    Options greedy;
    greedy.temperature = 0, greedy.max_tokens = 8;
    std::string text;
    Stream chat = client.chat({{"user", "What is the capital of France?"}}, greedy);
    for (const Chunk& chunk : chat) text += chunk.text;
    CHECK(text.find("Paris") != std::string::npos);
    EQUAL(chat.result().text, text);
    EQUAL(chat.result().usage.completion, static_cast<std::int64_t>(chat.result().token_ids.size()));

    Stream once = client.generate("Once upon a time", short_options());
    Stream again = client.generate("Once upon a time", short_options());
    CHECK(once.result().token_ids == again.result().token_ids);
    Options options = short_options();
    options.n = 2, options.logprobs = 2, options.prompt_logprobs = 0;
    const Result both = client.generate(std::vector<std::uint32_t>{1, 2, 3}, options).result();
    EQUAL(both.choices.size(), 2u);
    EQUAL(both.choices[1].token_ids.size(), 4u);
    EQUAL(both.choices[1].logprobs.size(), 4u);
    EQUAL(both.logprobs[0].top.size(), 2u);
    EQUAL(both.prompt_logprobs.size(), 2u);
    EQUAL(both.seed, 7u);
});

const test::Test live_errors("live: what is refused, leaving early, load, files", [] {
    Client client = connect(live());
    Options options;
    options.temperature = -1;
    EQUAL(THROWS(InvalidRequest, client.generate("x", options).result()).field().value(), "temperature");
    options = Options();
    options.max_tokens = 1000, options.ignore_eos = true;
    for (const Chunk& chunk : client.generate("Count to a thousand:", options)) {
        if (chunk.index > 2) break;
    }
    for (int i = 0; client.load().running != 0 && i < 100; ++i) std::this_thread::sleep_for(50ms);
    EQUAL(client.load().running, 0);
    CHECK(!client.stats().empty());
    for (const FileInfo& file : client.info().files) EQUAL(client.file(file.name).size(), file.size);
});

const test::Test live_resume("live: another client goes on with a stream", [] {
    const std::string url = live();
    Options options = short_options();
    options.max_tokens = 16;
    Client first = connect(url), second = connect(url);
    const Result whole = first.generate("The sea", options).result();
    Stream stream = first.generate("The sea", options);
    std::string text;
    for (const Chunk& chunk : stream) {
        text += chunk.text;
        if (chunk.index >= 3) break;
    }
    first.close(true);
    const Ticket ticket = stream.ticket().value();
    const Result rest = second.resume(ticket).result();
    CHECK(rest.token_ids == std::vector<std::uint32_t>(whole.token_ids.begin() + ticket.received[0], whole.token_ids.end()));
    EQUAL(text + rest.text, whole.text);
    THROWS(UnknownStream, second.resume({ticket.request_id, "00", {0}}).result());
});

const test::Test live_keys("live: a server with keys", [] {
    const std::string url = live("PAGEWIRE_CURVE_URL");
    ConnectOptions options;
    options.curve = CurveKeys::load(live("PAGEWIRE_SERVER_KEY"), live("PAGEWIRE_KEY_FILE"));
    Client client = connect(url, options);
    EQUAL(client.generate(std::vector<std::uint32_t>{5, 6, 7}, short_options()).result().token_ids.size(), 4u);
    THROWS(Unauthorized, connect(url));
    std::tie(options.curve->public_key, options.curve->secret_key) = test::curve_pair();
    THROWS(Unauthorized, connect(url, options));
});

}  // namespace
