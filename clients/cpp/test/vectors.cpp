// Frames against the golden vectors (`transport/vectors`).

#include <functional>
#include <map>
#include <string>

#include <pagewire/client.hpp>

#include "check.hpp"
#include "json.hpp"

namespace {

using namespace pagewire;
using pagewire::detail::MapWriter;
using Texts = std::map<std::string, std::string>;

// All of `ours` stands in `full` (which has every default), and all of `message` in ours.
void agree(const std::string& name, const msgpack::object& ours, const test::Json& full, const test::Json& message) {
    const bool is_plain = full.kind == test::Json::Kind::object && full.fields.count("map") + full.fields.count("hex") == 0;
    if (ours.type != msgpack::type::MAP || !is_plain) {
        if (full.kind != test::Json::Kind::object || !full.fields.empty()) EQUAL(name + test::canonical(ours), name + full.canonical());
        return;
    }
    std::size_t num_found = 0;
    for (std::uint32_t i = 0; i < ours.via.map.size; ++i) {
        const auto& pair = ours.via.map.ptr[i];
        const std::string key(pair.key.via.str.ptr, pair.key.via.str.size);
        CHECK(full.fields.count(key) == 1);
        agree(name + "." + key, pair.val, full[key], message[key]);
        num_found += message.fields.count(key);
    }
    EQUAL(name + std::to_string(num_found), name + std::to_string(message.fields.size()));
}

std::map<std::string, std::function<MapWriter()>> sent() {
    return {
        {"hello", [] { return detail::hello(""); }},
        {"generate, token ids", [] {
             MapWriter map = detail::generate(1, {});
             map.bytes("prompt_ids", detail::pack_ids({1, 128000, 4294967295u}));
             return map;
         }},
        {"generate, text", [] {
             Options options;
             options.max_tokens = 64;
             MapWriter map = detail::generate(2, options);
             map.field("prompt", std::string("Once upon a time, in Zürich 🏔"));
             return map;
         }},
        {"generate, messages", [] {
             Options options;
             options.template_kwargs = {{"thinking", false}, {"date", std::string("2026-01-31")}, {"depth", std::int64_t{3}},
                                        {"share", 0.5}, {"tools", nullptr}};
             MapWriter map = detail::generate(3, options);
             detail::put_messages(map, {{"system", "Be brief."}, {"user", "Why?"}});
             return map;
         }},
        {"generate, all parameters", [] {
             Options o;
             o.max_tokens = 2147483647, o.min_tokens = 3, o.temperature = 0.7, o.top_k = 40, o.top_p = 0.95, o.min_p = 0.05;
             o.repetition_penalty = 1.1, o.presence_penalty = -0.5, o.frequency_penalty = 0.25;
             o.logit_bias = {{7, -100.0}, {128000, 1.5}}, o.seed = 9223372036854775807u, o.n = 2, o.logprobs = 5;
             o.prompt_logprobs = 0, o.stop = {"\n\n", "###"}, o.stop_token_ids = {2, 3}, o.ignore_eos = true;
             o.priority = -100, o.name_space = "tenant-a", o.echo_text = false;
             MapWriter map = detail::generate(4294967295u, o);
             map.bytes("prompt_ids", detail::pack_ids({5}));
             return map;
         }},
        {"generate, slow readers pause it", [] {
             Options options;
             options.temperature = 0, options.on_lag = "pause", options.resumable = false;
             MapWriter map = detail::generate(5, options);
             map.bytes("prompt_ids", detail::pack_ids({5}));
             return map;
         }},
        {"resume", [] { return detail::resume(1, {"r-00c0ffee", "00112233445566778899aabbccddeeff", {17}}); }},
        {"pause", [] { return detail::pause(1, true); }},
        {"pause, go on", [] { return detail::pause(1, false); }},
        {"cancel", [] { return detail::message("cancel", 1); }},
        {"finish", [] { return detail::finish(1, 1, 17); }},
        {"finish, first choice", [] { return detail::finish(1, 0, 0); }},
        {"ping", [] { return detail::message("ping"); }},
        {"goodbye", [] { return detail::message("goodbye"); }},
        {"get_stats", [] { return detail::message("get_stats"); }},
        {"get_load", [] { return detail::message("get_load"); }},
        {"get_file", [] { return detail::get_file("tokenizer.json", 65536); }},
    };
}

const test::Test what_a_client_sends("what a client sends", [] {
    const auto made = sent();
    std::size_t num = 0;
    for (const test::Json& vector : test::vectors("client.json")) {
        const auto found = made.find(vector["name"].text);
        if (found == made.end()) continue;
        const std::string frame = found->second().frame();
        EQUAL(frame[0], '\1');
        std::size_t at = 1;
        const auto handle = msgpack::unpack(frame.data(), frame.size(), at);
        agree(found->first, handle.get(), vector["full"], vector["message"]);
        ++num;
    }
    EQUAL(num, made.size());
});

std::string text(const std::string& value) { return '"' + value + '"'; }
std::string text(bool value) { return value ? "true" : "false"; }
std::string text(std::int64_t value) { return std::to_string(value); }
std::string text(std::uint32_t value) { return std::to_string(value); }
template <typename T>
std::string text(const std::optional<T>& value) {
    return value ? text(*value) : "null";
}
template <typename T, typename Text>
std::string text(const std::vector<T>& values, Text each) {
    std::string out = "[";
    for (const T& value : values) out += each(value) + ",";
    return out + "]";
}
std::string map(const Texts& items) {
    Texts quoted;
    for (const auto& [key, value] : items) quoted[text(key)] = value;
    return test::object(quoted);
}
std::string list(const std::vector<std::int64_t>& values) {
    return text(values, [](std::int64_t value) { return std::to_string(value); });
}

Texts fields(const ServerInfo& m) {
    const Limits& l = m.limits;
    return {{"version", std::to_string(m.version)}, {"role", text(m.role)}, {"server", text(m.server)}, {"model", text(m.model)},
            {"vocab_size", text(m.vocab_size)}, {"max_model_len", text(m.max_model_len)}, {"max_streams", text(m.max_streams)},
            {"max_message_bytes", text(m.max_message_bytes)}, {"heartbeat_ms", text(m.heartbeat_ms)},
            {"heartbeat_timeout_ms", text(m.heartbeat_timeout_ms)}, {"eos_ids", list(m.eos_ids)}, {"versions", list(m.versions)},
            {"limits", map({{"max_n", text(l.max_n)}, {"max_stop_strings", text(l.max_stop_strings)},
                            {"max_stop_chars", text(l.max_stop_chars)}, {"max_stop_token_ids", text(l.max_stop_token_ids)},
                            {"max_logit_bias", text(l.max_logit_bias)}, {"max_top_logprobs", text(l.max_top_logprobs)},
                            {"max_messages", text(l.max_messages)}, {"max_template_kwargs", text(l.max_template_kwargs)},
                            {"max_file_piece", text(l.max_file_piece)}, {"max_offences", text(l.max_offences)}})},
            {"files", text(m.files, [](const FileInfo& file) {
                 return map({{"name", text(file.name)}, {"size", std::to_string(file.size)}, {"sha256", text(file.sha256)}});
             })}};
}
Texts fields(const Accepted& m) {
    return {{"stream", text(m.stream)}, {"request_id", text(m.request_id)}, {"seed", std::to_string(m.seed)},
            {"num_prompt_tokens", text(m.num_prompt_tokens)}, {"max_tokens", text(m.max_tokens)}, {"resume_key", text(m.resume_key)}};
}
Texts fields(const Tokens& m) {
    std::string logprobs = "null";
    if (m.logprobs) {
        const LogprobColumns& l = *m.logprobs;
        logprobs = map({{"entries", test::hex(l.entries)}, {"top", test::hex(l.top)}, {"chosen", test::hex(l.chosen)},
                        {"top_ids", test::hex(l.top_ids)}, {"top_logprobs", test::hex(l.top_logprobs)}});
    }
    return {{"streams", test::hex(m.streams)}, {"starts", test::hex(m.starts)}, {"ids", test::hex(m.ids)},
            {"counts", test::hex(m.counts)}, {"choices", test::hex(m.choices)}, {"logprobs", logprobs},
            {"texts", text(m.texts, [](const std::string& value) { return text(value); })}};
}
Texts fields(const PromptLogprobs& m) {
    return {{"stream", text(m.stream)}, {"top", text(m.top)}, {"chosen", test::hex(m.chosen)},
            {"top_ids", test::hex(m.top_ids)}, {"top_logprobs", test::hex(m.top_logprobs)}};
}
Texts fields(const Finished& m) {
    std::string stop = "null";
    if (const auto* words = std::get_if<std::string>(&m.stop)) stop = text(*words);
    if (const auto* id = std::get_if<std::int64_t>(&m.stop)) stop = text(*id);
    return {{"stream", text(m.stream)}, {"choice", text(m.choice)}, {"reason", text(m.reason)},
            {"num_tokens", text(m.num_tokens)}, {"stop", stop}, {"text", text(m.text)}};
}
Texts fields(const Done& m) {
    return {{"stream", text(m.stream)}, {"seed", std::to_string(m.seed)},
            {"usage", map({{"prompt", text(m.usage.prompt)}, {"completion", text(m.usage.completion)}, {"cached", text(m.usage.cached)}})},
            {"timings", map({{"queue_ns", text(m.timings.queue_ns)}, {"first_token_ns", text(m.timings.first_token_ns)},
                             {"total_ns", text(m.timings.total_ns)}, {"num_preemptions", text(m.timings.num_preemptions)}})}};
}
Texts fields(const ErrorMessage& m) {
    return {{"code", text(m.fault.code)}, {"message", text(m.fault.message)}, {"field", text(m.fault.field)},
            {"retry_after_ms", text(m.fault.retry_after_ms)},
            {"predicted_ttft_ms", text(m.fault.predicted_ttft_ms)}, {"stream", m.stream ? std::to_string(*m.stream) : "null"}};
}
Texts fields(const Pong& m) { return {{"nonce", text(m.nonce)}, {"ready", text(m.ready)}, {"reason", text(m.reason)}}; }
Texts fields(const Stats& m) {
    Texts values;
    for (const auto& [key, value] : m.values) values[key] = test::number(value);
    return {{"values", map(values)}};
}
Texts fields(const Load& m) {
    return {{"ready", text(m.ready)}, {"running", text(m.running)}, {"waiting", text(m.waiting)},
            {"kv_blocks", text(m.kv_blocks)}, {"kv_blocks_used", text(m.kv_blocks_used)}};
}
Texts fields(const FilePiece& m) {
    return {{"name", text(m.name)}, {"offset", std::to_string(m.offset)}, {"data", test::hex(m.data)}, {"size", std::to_string(m.size)}};
}
Texts fields(const AdminDone& m) { return {{"what", text(m.what)}, {"message", text(m.message)}}; }

std::string text(const detail::Run& run, bool has_texts) {
    const auto ids = text(run.ids, [](std::uint32_t id) { return std::to_string(id); });
    const auto logprobs = text(run.logprobs, [](const TokenLogprob& token) {
        const auto top = text(token.top, [](const std::pair<std::uint32_t, float>& pair) {
            return "[" + std::to_string(pair.first) + "," + test::number(pair.second) + ",]";
        });
        return map({{"chosen", test::number(token.logprob)}, {"top", top}});
    });
    return map({{"stream", text(run.stream)}, {"choice", text(run.choice)}, {"start", text(run.start)}, {"ids", ids},
                {"text", has_texts ? text(run.text) : "null"}, {"logprobs", run.has_logprobs ? logprobs : "null"}});
}

const test::Test what_a_server_sends("what a server sends", [] {
    auto known = test::vectors("server.json");
    for (const test::Json& vector : test::vectors("tolerated.json")) {
        if (vector["from"].text == "server") known.push_back(vector);
    }
    for (const test::Json& vector : known) {
        const std::string name = vector["name"].text + ": ", frame = test::unhex(vector["frame"].text);
        const Message message = detail::decode(frame.data(), frame.size());
        const Texts ours = std::visit([](const auto& held) { return fields(held); }, message);
        // All that we know stands there; there may be more: a server may say what this client has no use for.
        for (const auto& [key, value] : ours) EQUAL(name + key + value, name + key + vector["full"][key].canonical());
        const auto* tokens = std::get_if<Tokens>(&message);
        if (tokens == nullptr || vector["runs"].kind == test::Json::Kind::null) continue;
        const bool has_texts = !tokens->texts.empty();
        EQUAL(text(detail::runs(*tokens), [&](const detail::Run& run) { return text(run, has_texts); }), vector["runs"].canonical());
    }
});

const test::Test what_is_no_message("what is no message", [] {
    for (const test::Json& vector : test::vectors("refused.json")) {
        if (vector["from"].text != "server") continue;
        const std::string frame = test::unhex(vector["frame"].text);
        EQUAL(THROWS(Error, detail::decode(frame.data(), frame.size())).code(), vector["code"].text);
    }
});

const test::Test texts("texts must be UTF-8", [] {
    for (const std::string good : {"", "a", "Zürich 🏔", "\U0010ffff"}) detail::check_text(good, "x");
    for (const std::string bad : {"\xff", "\xc3", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "a\x80"}) {
        THROWS(InvalidRequest, detail::check_text(bad, "x"));
    }
});

}  // namespace
