// What a client sends, and its encoding.
#pragma once

#include <cstdint>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <msgpack/pack.hpp>

#include "errors.hpp"
#include "messages.hpp"

namespace pagewire {

// How tokens are chosen and when a continuation ends; what is not set is left to the server, which also checks ranges
// and refuses by name.
struct SamplingParams {
    std::optional<std::int64_t> max_tokens;  // as many as fit, by default
    std::optional<std::int64_t> min_tokens;
    std::optional<double> temperature;  // 0 is greedy
    std::optional<std::int64_t> top_k;
    std::optional<double> top_p, min_p;
    std::optional<double> repetition_penalty, presence_penalty, frequency_penalty;
    std::map<std::int64_t, double> logit_bias;  // by token id
    std::optional<std::uint64_t> seed;          // drawn by the server, by default; the result tells it
    std::optional<std::int64_t> n;              // continuations; chunks of all of them come as they are made
    std::optional<std::int64_t> logprobs;       // 0: of the chosen token; k: also of the k most likely
    std::optional<std::int64_t> prompt_logprobs;
    std::vector<std::string> stop;
    std::vector<std::int64_t> stop_token_ids;
    std::optional<bool> ignore_eos;
};

using TemplateValue = std::variant<std::nullptr_t, bool, std::int64_t, double, std::string>;

// Of a request, beside its prompt.
struct Options : SamplingParams {
    std::optional<std::int64_t> priority;             // higher runs first: -100 to 100
    std::string name_space;                           // prefix cache entries are shared inside a namespace only
    std::optional<bool> echo_text;                    // false: token ids only, no text
    std::string on_lag;                               // "coalesce" (default), "pause" or "cancel", where the client lags
    std::optional<bool> resumable;                    // false: the stream ends with its connection
    // Wanted milliseconds to the first token and between tokens; where they cannot be kept, the answer is Overloaded.
    std::optional<double> ttft_ms, itl_ms;
    std::optional<double> deadline_ms;  // beyond it the stream ends with DeadlineExceeded
    std::map<std::string, TemplateValue> template_kwargs;  // for the chat template; `chat` only
};

// A turn of a conversation.
struct ChatMessage {
    std::string role;
    std::string content;
};

// What it takes to go on with a stream from another process. The key is a secret.
struct Ticket {
    std::string request_id;
    std::string resume_key;
    std::vector<std::uint32_t> received;  // how many tokens of each choice are there already
};

namespace detail {

// A map that grows field by field.
class MapWriter {
  public:
    template <typename T>
    void field(std::string_view name, const T& value) {
        key(name);
        put(value);
    }
    template <typename T>
    void field(std::string_view name, const std::optional<T>& value) {
        if (value) field(name, *value);
    }
    void bytes(std::string_view name, std::string_view value) {
        key(name);
        packer().pack_bin(static_cast<std::uint32_t>(value.size()));
        packer().pack_bin_body(value.data(), static_cast<std::uint32_t>(value.size()));
    }
    // An array of what `put_item` writes.
    template <typename List, typename Put>
    void list(std::string_view name, const List& items, Put put_item) {
        key(name);
        packer().pack_array(static_cast<std::uint32_t>(items.size()));
        for (const auto& item : items) put_item(item);
    }
    template <typename Key, typename Value>
    void map(std::string_view name, const std::map<Key, Value>& items) {
        key(name);
        packer().pack_map(static_cast<std::uint32_t>(items.size()));
        for (const auto& [item, value] : items) put(item), put(value);
    }
    void put(const MapWriter& map) {
        const std::string text = map.finish();
        body_.write(text.data(), text.size());
    }
    void put(const std::string& value) { put(std::string_view(value)); }
    void put(std::string_view value) {
        packer().pack_str(static_cast<std::uint32_t>(value.size()));
        packer().pack_str_body(value.data(), static_cast<std::uint32_t>(value.size()));
    }
    void put(std::nullptr_t) { packer().pack_nil(); }
    void put(bool value) { value ? packer().pack_true() : packer().pack_false(); }
    void put(double value) { packer().pack_double(value); }
    void put(std::int64_t value) { packer().pack_int64(value); }
    void put(std::uint64_t value) { packer().pack_uint64(value); }
    void put(std::uint32_t value) { packer().pack_uint32(value); }
    void put(const TemplateValue& value) {
        std::visit([this](const auto& held) { put(held); }, value);
    }

    std::string finish() const {
        Body whole;
        msgpack::packer<Body>(whole).pack_map(size_);
        return whole.text + body_.text;
    }
    // The frame of a message.
    std::string frame() const { return std::string(1, static_cast<char>(protocol_version)) + finish(); }

  private:
    void key(std::string_view name) {
        ++size_;
        put(name);
    }

    // A string as the library writes to it.
    struct Body {
        std::string text;
        void write(const char* data, std::size_t size) { text.append(data, size); }
    };

    msgpack::packer<Body> packer() { return msgpack::packer<Body>(body_); }

    Body body_;
    std::uint32_t size_ = 0;
};

inline MapWriter message(std::string_view t) {
    MapWriter map;
    map.field("t", t);
    return map;
}

inline MapWriter message(std::string_view t, std::uint32_t stream) {
    MapWriter map = message(t);
    map.field("stream", stream);
    return map;
}

inline std::string pack_ids(const std::vector<std::uint32_t>& ids) {
    std::string out;
    out.reserve(4 * ids.size());
    for (const std::uint32_t id : ids) {
        for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<char>(id >> shift));
    }
    return out;
}

// Throws InvalidRequest: the bytes are not UTF-8, which MessagePack's texts are.
inline void check_text(std::string_view text, const std::string& field) {
    for (std::size_t i = 0; i < text.size();) {
        const auto lead = static_cast<unsigned char>(text[i]);
        const int more = lead < 0x80 ? 0 : lead >> 5 == 6 ? 1 : lead >> 4 == 14 ? 2 : lead >> 3 == 30 ? 3 : -1;
        std::uint32_t code = more <= 0 ? lead : lead & (0x3f >> more);
        bool is_good = more >= 0 && i + static_cast<std::size_t>(more) < text.size();
        for (int k = 1; is_good && k <= more; ++k) {
            const auto next = static_cast<unsigned char>(text[i + static_cast<std::size_t>(k)]);
            is_good = next >> 6 == 2;
            code = code << 6 | (next & 0x3f);
        }
        constexpr std::uint32_t least[] = {0, 0x80, 0x800, 0x10000};
        if (!is_good || code < least[more] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) {
            throw InvalidRequest({"invalid_request", "must be text in UTF-8", field});
        }
        i += static_cast<std::size_t>(more) + 1;
    }
}

inline MapWriter params(const SamplingParams& p) {
    MapWriter map;
    map.field("max_tokens", p.max_tokens), map.field("min_tokens", p.min_tokens);
    map.field("temperature", p.temperature), map.field("top_k", p.top_k);
    map.field("top_p", p.top_p), map.field("min_p", p.min_p);
    map.field("repetition_penalty", p.repetition_penalty), map.field("presence_penalty", p.presence_penalty);
    map.field("frequency_penalty", p.frequency_penalty);
    if (!p.logit_bias.empty()) map.map("logit_bias", p.logit_bias);
    map.field("seed", p.seed), map.field("n", p.n);
    map.field("logprobs", p.logprobs), map.field("prompt_logprobs", p.prompt_logprobs);
    for (const auto& stop : p.stop) check_text(stop, "stop");
    if (!p.stop.empty()) map.list("stop", p.stop, [&](const std::string& stop) { map.put(stop); });
    if (!p.stop_token_ids.empty()) map.list("stop_token_ids", p.stop_token_ids, [&](std::int64_t id) { map.put(id); });
    map.field("ignore_eos", p.ignore_eos);
    return map;
}

// A `generate` but for its prompt.
inline MapWriter generate(std::uint32_t stream, const Options& options) {
    MapWriter map = message("generate", stream);
    map.field("params", params(options));
    map.field("priority", options.priority), map.field("echo_text", options.echo_text);
    map.field("resumable", options.resumable), map.field("ttft_ms", options.ttft_ms);
    map.field("itl_ms", options.itl_ms), map.field("deadline_ms", options.deadline_ms);
    if (!options.name_space.empty()) map.field("namespace", options.name_space);
    if (!options.on_lag.empty()) map.field("on_lag", options.on_lag);
    if (!options.template_kwargs.empty()) map.map("template_kwargs", options.template_kwargs);
    return map;
}

inline void put_messages(MapWriter& map, const std::vector<ChatMessage>& messages) {
    map.list("messages", messages, [&](const ChatMessage& turn) {
        check_text(turn.content, "messages");
        MapWriter item;
        item.field("role", turn.role), item.field("content", turn.content);
        map.put(item);
    });
}

inline MapWriter hello(const std::string& client) {
    MapWriter map = message("hello");
    const std::vector<std::int64_t> versions{protocol_version};
    map.list("versions", versions, [&](std::int64_t version) { map.put(version); });
    map.field("client", client);
    return map;
}

inline MapWriter resume(std::uint32_t stream, const Ticket& ticket) {
    MapWriter map = message("resume", stream);
    map.field("request_id", ticket.request_id), map.field("resume_key", ticket.resume_key);
    map.bytes("received", pack_ids(ticket.received));
    return map;
}

inline MapWriter finish(std::uint32_t stream, std::int64_t choice, std::int64_t at) {
    MapWriter map = message("finish", stream);
    map.field("choice", choice), map.field("at", at);
    return map;
}

inline MapWriter pause(std::uint32_t stream, bool is_paused) {
    MapWriter map = message("pause", stream);
    map.field("paused", is_paused);
    return map;
}

inline MapWriter get_file(const std::string& name, std::uint64_t offset) {
    MapWriter map = message("get_file");
    map.field("name", name), map.field("offset", offset);
    return map;
}

}  // namespace detail
}  // namespace pagewire
