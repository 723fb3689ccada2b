// The messages of a server, version 1 of the protocol, and their decoding. `transport/PROTOCOL.md` describes each.
//
// A frame is one version byte and one MessagePack map; fields that this client does not know are skipped.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <msgpack/unpack.hpp>

#include "errors.hpp"

namespace pagewire {

constexpr std::uint8_t protocol_version = 1;

// A file of the tokenizer, which `Client::file` fetches.
struct FileInfo {
    std::string name;
    std::uint64_t size = 0;
    std::string sha256;
};

// The most that a request may have.
struct Limits {
    std::int64_t max_n = 16, max_stop_strings = 16, max_stop_chars = 256, max_stop_token_ids = 64, max_logit_bias = 300,
                 max_top_logprobs = 20, max_messages = 16384, max_template_kwargs = 64, max_file_piece = 65536,
                 max_offences = 8;
};

// What the server says of itself and of its limits.
struct ServerInfo {
    int version = 0;
    std::string role;  // "engine" or "gateway"
    std::string server;
    std::string model;
    std::int64_t vocab_size = 0, max_model_len = 0, max_streams = 0, max_message_bytes = 0;
    std::int64_t heartbeat_ms = 0, heartbeat_timeout_ms = 0;
    std::vector<std::int64_t> eos_ids;
    std::vector<std::int64_t> versions{protocol_version};
    Limits limits;
    std::vector<FileInfo> files;
};

struct Accepted {
    std::uint32_t stream = 0;
    std::string request_id;
    std::uint64_t seed = 0;
    std::int64_t num_prompt_tokens = 0, max_tokens = 0;
    std::string resume_key;
};

struct LogprobColumns {
    std::string entries, top, chosen, top_ids, top_logprobs;
};

// Packed columns; see `runs`.
struct Tokens {
    std::string streams, starts, ids, counts, choices;
    std::vector<std::string> texts;
    std::optional<LogprobColumns> logprobs;
};

struct PromptLogprobs {
    std::uint32_t stream = 0;
    std::int64_t top = 0;
    std::string chosen, top_ids, top_logprobs;
};

// The stop string or the stop token's id that ended a choice, if one did.
using Stop = std::variant<std::monostate, std::string, std::int64_t>;

struct Finished {
    std::uint32_t stream = 0;
    std::int64_t choice = 0;
    std::string reason;  // "stop", "length", "cancelled" or "error"
    std::int64_t num_tokens = 0;
    Stop stop;
    std::string text;
};

// Tokens of a request; `cached` is the part of the prompt that the prefix cache held.
struct Usage {
    std::int64_t prompt = 0, completion = 0, cached = 0;
};

// Measured by the engine, in nanoseconds since the request arrived there.
struct ServerTimings {
    std::int64_t queue_ns = 0, first_token_ns = 0, total_ns = 0, num_preemptions = 0;
};

struct Done {
    std::uint32_t stream = 0;
    std::uint64_t seed = 0;
    Usage usage;
    ServerTimings timings;
};

struct ErrorMessage {
    Fault fault;
    std::optional<std::uint32_t> stream;
};

struct Pong {
    std::int64_t nonce = 0;
    bool ready = true;
    std::string reason;
};

struct Stats {
    std::map<std::string, double> values;
};

// How busy a server is.
struct Load {
    bool ready = false;
    std::int64_t running = 0, waiting = 0, kv_blocks = 0, kv_blocks_used = 0;
};

struct FilePiece {
    std::string name;
    std::uint64_t offset = 0;
    std::string data;
    std::uint64_t size = 0;
};

struct AdminDone {
    std::string what, message;
};

using Message = std::variant<ServerInfo, Accepted, Tokens, PromptLogprobs, Finished, Done, ErrorMessage, Pong, Stats,
                             Load, FilePiece, AdminDone>;

namespace detail {

constexpr std::size_t max_reply_bytes = 64u << 20;

// The fields of a decoded map, each of the type that is asked for; else a ProtocolError names it.
class Fields {
  public:
    explicit Fields(const msgpack::object& object) : object_(object) {
        if (object.type != msgpack::type::MAP) throw ProtocolError({"protocol", "not a message: no map"});
    }

    // Null where it is absent or nil.
    const msgpack::object* find(std::string_view name) const {
        const auto& map = object_.via.map;
        for (std::uint32_t i = 0; i < map.size; ++i) {
            const auto& key = map.ptr[i].key;
            if (key.type == msgpack::type::STR && std::string_view(key.via.str.ptr, key.via.str.size) == name) {
                return map.ptr[i].val.type == msgpack::type::NIL ? nullptr : &map.ptr[i].val;
            }
        }
        return nullptr;
    }

    void get(std::string_view name, std::string& out) const { read(name, need(name), out); }
    void get(std::string_view name, bool& out) const {
        const auto& value = need(name);
        if (value.type != msgpack::type::BOOLEAN) wrong(name);
        out = value.via.boolean;
    }
    template <typename Int>
    void get(std::string_view name, Int& out) const {
        out = integer<Int>(name, need(name));
    }
    void bytes(std::string_view name, std::string& out) const {
        const auto& value = need(name);
        if (value.type != msgpack::type::BIN) wrong(name);
        out.assign(value.via.bin.ptr, value.via.bin.size);
    }
    Fields map(std::string_view name) const {
        const auto& value = need(name);
        if (value.type != msgpack::type::MAP) wrong(name);
        return Fields(value);
    }

    // The same for fields that may be absent: `out` stays as it is.
    template <typename T>
    void maybe(std::string_view name, T& out) const {
        if (find(name) != nullptr) get(name, out);
    }
    template <typename T>
    void maybe(std::string_view name, std::optional<T>& out) const {
        if (find(name) != nullptr) get(name, out.emplace());
    }
    void maybe_bytes(std::string_view name, std::string& out) const {
        if (find(name) != nullptr) bytes(name, out);
    }
    template <typename Take>
    void each(std::string_view name, Take take) const {
        const auto* value = find(name);
        if (value == nullptr) return;
        if (value->type != msgpack::type::ARRAY) wrong(name);
        for (std::uint32_t i = 0; i < value->via.array.size; ++i) take(value->via.array.ptr[i]);
    }
    void list(std::string_view name, std::vector<std::string>& out) const {
        each(name, [&](const msgpack::object& item) { read(name, item, out.emplace_back()); });
    }
    void list(std::string_view name, std::vector<std::int64_t>& out) const {
        if (find(name) != nullptr) out.clear();
        each(name, [&](const msgpack::object& item) { out.push_back(integer<std::int64_t>(name, item)); });
    }
    void numbers(std::string_view name, std::map<std::string, double>& out) const {
        const Fields values = map(name);
        for (std::uint32_t i = 0; i < values.object_.via.map.size; ++i) {
            const auto& pair = values.object_.via.map.ptr[i];
            std::string key;
            read(name, pair.key, key);
            out[key] = number(name, pair.val);
        }
    }
    void stop(std::string_view name, Stop& out) const {
        const auto* value = find(name);
        if (value == nullptr) return;
        if (value->type == msgpack::type::STR) read(name, *value, out.emplace<std::string>());
        else out = integer<std::int64_t>(name, *value);
    }

  private:
    const msgpack::object& need(std::string_view name) const {
        const auto* value = find(name);
        if (value == nullptr) throw ProtocolError({"protocol", "is missing", std::string(name)});
        return *value;
    }
    [[noreturn]] static void wrong(std::string_view name) {
        throw ProtocolError({"protocol", "is of the wrong type", std::string(name)});
    }
    static void read(std::string_view name, const msgpack::object& value, std::string& out) {
        if (value.type != msgpack::type::STR) wrong(name);
        out.assign(value.via.str.ptr, value.via.str.size);
    }
    template <typename Int>
    static Int integer(std::string_view name, const msgpack::object& value) {
        if (value.type == msgpack::type::POSITIVE_INTEGER) return static_cast<Int>(value.via.u64);
        if (value.type == msgpack::type::NEGATIVE_INTEGER) return static_cast<Int>(value.via.i64);
        wrong(name);
    }
    static double number(std::string_view name, const msgpack::object& value) {
        if (value.type == msgpack::type::FLOAT32 || value.type == msgpack::type::FLOAT64) return value.via.f64;
        return static_cast<double>(integer<std::int64_t>(name, value));
    }

    const msgpack::object& object_;
};

inline ServerInfo read_welcome(const Fields& f) {
    ServerInfo m;
    f.get("version", m.version), f.get("role", m.role), f.get("server", m.server), f.get("model", m.model);
    f.get("vocab_size", m.vocab_size), f.get("max_model_len", m.max_model_len), f.get("max_streams", m.max_streams);
    f.get("max_message_bytes", m.max_message_bytes), f.get("heartbeat_ms", m.heartbeat_ms);
    f.get("heartbeat_timeout_ms", m.heartbeat_timeout_ms), f.list("eos_ids", m.eos_ids), f.list("versions", m.versions);
    if (f.find("limits") != nullptr) {
        const Fields l = f.map("limits");
        l.maybe("max_n", m.limits.max_n), l.maybe("max_stop_strings", m.limits.max_stop_strings);
        l.maybe("max_stop_chars", m.limits.max_stop_chars), l.maybe("max_stop_token_ids", m.limits.max_stop_token_ids);
        l.maybe("max_logit_bias", m.limits.max_logit_bias), l.maybe("max_top_logprobs", m.limits.max_top_logprobs);
        l.maybe("max_messages", m.limits.max_messages), l.maybe("max_template_kwargs", m.limits.max_template_kwargs);
        l.maybe("max_file_piece", m.limits.max_file_piece), l.maybe("max_offences", m.limits.max_offences);
    }
    f.each("files", [&](const msgpack::object& item) {
        const Fields file(item);
        FileInfo& info = m.files.emplace_back();
        file.get("name", info.name), file.get("size", info.size), file.get("sha256", info.sha256);
    });
    return m;
}

inline Tokens read_tokens(const Fields& f) {
    Tokens m;
    f.bytes("streams", m.streams), f.bytes("starts", m.starts), f.bytes("ids", m.ids);
    f.maybe_bytes("counts", m.counts), f.maybe_bytes("choices", m.choices), f.list("texts", m.texts);
    if (f.find("logprobs") != nullptr) {
        const Fields l = f.map("logprobs");
        LogprobColumns& c = m.logprobs.emplace();
        l.bytes("entries", c.entries), l.bytes("top", c.top), l.bytes("chosen", c.chosen);
        l.maybe_bytes("top_ids", c.top_ids), l.maybe_bytes("top_logprobs", c.top_logprobs);
    }
    return m;
}

inline Done read_done(const Fields& f) {
    Done m;
    f.get("stream", m.stream), f.get("seed", m.seed);
    const Fields usage = f.map("usage"), timings = f.map("timings");
    usage.get("prompt", m.usage.prompt), usage.get("completion", m.usage.completion), usage.maybe("cached", m.usage.cached);
    timings.get("queue_ns", m.timings.queue_ns), timings.get("first_token_ns", m.timings.first_token_ns);
    timings.get("total_ns", m.timings.total_ns), timings.maybe("num_preemptions", m.timings.num_preemptions);
    return m;
}

inline Message read_message(const std::string& t, const Fields& f) {
    if (t == "welcome") return read_welcome(f);
    if (t == "tokens") return read_tokens(f);
    if (t == "done") return read_done(f);
    if (t == "accepted") {
        Accepted m;
        f.get("stream", m.stream), f.get("request_id", m.request_id), f.get("seed", m.seed);
        f.get("num_prompt_tokens", m.num_prompt_tokens), f.get("max_tokens", m.max_tokens);
        f.maybe("resume_key", m.resume_key);
        return m;
    }
    if (t == "prompt_logprobs") {
        PromptLogprobs m;
        f.get("stream", m.stream), f.get("top", m.top), f.bytes("chosen", m.chosen);
        f.maybe_bytes("top_ids", m.top_ids), f.maybe_bytes("top_logprobs", m.top_logprobs);
        return m;
    }
    if (t == "finished") {
        Finished m;
        f.get("stream", m.stream), f.maybe("choice", m.choice), f.get("reason", m.reason);
        f.get("num_tokens", m.num_tokens), f.stop("stop", m.stop), f.maybe("text", m.text);
        return m;
    }
    if (t == "error") {
        ErrorMessage m;
        f.get("code", m.fault.code), f.get("message", m.fault.message), f.maybe("field", m.fault.field);
        f.maybe("retry_after_ms", m.fault.retry_after_ms);
        f.maybe("predicted_ttft_ms", m.fault.predicted_ttft_ms), f.maybe("stream", m.stream);
        return m;
    }
    if (t == "pong") {
        Pong m;
        f.maybe("nonce", m.nonce), f.maybe("ready", m.ready), f.maybe("reason", m.reason);
        return m;
    }
    if (t == "stats") {
        Stats m;
        f.numbers("values", m.values);
        return m;
    }
    if (t == "load") {
        Load m;
        f.get("ready", m.ready), f.get("running", m.running), f.get("waiting", m.waiting);
        f.get("kv_blocks", m.kv_blocks), f.get("kv_blocks_used", m.kv_blocks_used);
        return m;
    }
    if (t == "file_piece") {
        FilePiece m;
        f.get("name", m.name), f.get("offset", m.offset), f.bytes("data", m.data), f.get("size", m.size);
        return m;
    }
    if (t == "admin_done") {
        AdminDone m;
        f.get("what", m.what), f.maybe("message", m.message);
        return m;
    }
    throw ProtocolError({"protocol", "no message of this protocol: " + t, "t"});
}

// What a server sent. Throws VersionMismatch or ProtocolError.
inline Message decode(const void* frame, std::size_t size) {
    const char* data = static_cast<const char*>(frame);
    if (size == 0) throw ProtocolError({"protocol", "an empty frame"});
    if (size > max_reply_bytes) throw ProtocolError({"protocol", "a message of " + std::to_string(size) + " bytes"});
    if (static_cast<std::uint8_t>(data[0]) != protocol_version) {
        throw VersionMismatch({"version", "a frame of another protocol version; spoken here: 1"});
    }
    std::size_t at = 1;
    msgpack::object_handle handle;
    try {
        // Lengths that a frame declares are no longer than itself, whatever it says.
        const msgpack::unpack_limit limit(size, size, size, size, size, 32);
        handle = msgpack::unpack(data, size, at, nullptr, nullptr, limit);
    } catch (const std::exception& error) {
        throw ProtocolError({"protocol", std::string("not a message: ") + error.what()});
    }
    if (at != size) throw ProtocolError({"protocol", "bytes after the message"});
    const Fields fields(handle.get());
    std::string t;
    fields.get("t", t);
    return read_message(t, fields);
}

}  // namespace detail
}  // namespace pagewire
