// What a stream gives: chunks while it runs, a result when it is over; and the packed columns that they come in.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "messages.hpp"

namespace pagewire {

// Of one token: its log-probability, and the most likely tokens in its place as (token id, log-probability).
struct TokenLogprob {
    float logprob = 0;
    std::vector<std::pair<std::uint32_t, float>> top;
};

// What became known at once of one choice. Text and token ids may each be empty: a character can take several tokens,
// and what was held back because it could have become a stop string comes at the end.
struct Chunk {
    std::string text;
    std::vector<std::uint32_t> token_ids;
    std::int64_t index = 0;  // of the first of `token_ids` among the generated tokens
    std::uint32_t choice = 0;
    std::vector<TokenLogprob> logprobs;  // one a token, if they were asked for
};

// One finished continuation.
struct ChoiceResult {
    std::string text;  // empty from an engine, which knows token ids only
    std::vector<std::uint32_t> token_ids;
    std::string finish_reason;  // "stop", "length", "cancelled" or "error"
    Stop stop;
    std::vector<TokenLogprob> logprobs;
};

// Nanoseconds. Gaps are those between tokens seen here; tokens that came in one message are 0 apart.
struct Timings {
    std::optional<std::int64_t> ttft_ns;  // from the request to the first token here
    std::optional<std::int64_t> itl_p50_ns, itl_p95_ns, itl_p99_ns;
    std::int64_t total_ns = 0;
    ServerTimings server;
};

// A finished stream. The fields of the first choice are the result's own; `choices` has all of them.
struct Result : ChoiceResult {
    std::string request_id;
    std::vector<ChoiceResult> choices;
    Usage usage;
    std::uint64_t seed = 0;  // with this seed the same request gives the same tokens
    Timings timings;
    std::vector<TokenLogprob> prompt_logprobs;  // of the prompt's tokens but the first, if they were asked for
};

namespace detail {

// One entry of a `tokens` message.
struct Run {
    std::uint32_t stream = 0;
    std::uint32_t choice = 0;
    std::uint32_t start = 0;
    std::vector<std::uint32_t> ids;
    std::string text;
    std::vector<TokenLogprob> logprobs;
    bool has_logprobs = false;
};

// Numbers of a column: little-endian, `Size` bytes each.
template <std::size_t Size>
std::vector<std::uint32_t> unpack(std::string_view column) {
    if (column.size() % Size != 0) throw ProtocolError({"protocol", "a column is no multiple of its number's size"});
    std::vector<std::uint32_t> out(column.size() / Size);
    for (std::size_t i = 0; i < column.size(); ++i) {
        out[i / Size] |= static_cast<std::uint32_t>(static_cast<unsigned char>(column[i])) << (8 * (i % Size));
    }
    return out;
}

inline float as_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

[[noreturn]] inline void columns_differ() {
    throw ProtocolError({"protocol", "the columns of a message differ in length"});
}

// Log-probabilities of `num` tokens with `top` alternatives each.
inline std::vector<TokenLogprob> token_logprobs(std::string_view chosen, std::string_view top_ids,
                                                std::string_view top_logprobs, std::size_t num, std::size_t top) {
    if (chosen.size() != 4 * num || top_ids.size() != 4 * num * top || top_logprobs.size() != top_ids.size()) {
        columns_differ();
    }
    const auto values = unpack<4>(chosen), ids = unpack<4>(top_ids), others = unpack<4>(top_logprobs);
    std::vector<TokenLogprob> out(num);
    for (std::size_t i = 0; i < num; ++i) {
        out[i].logprob = as_float(values[i]);
        for (std::size_t j = i * top; j < (i + 1) * top; ++j) out[i].top.emplace_back(ids[j], as_float(others[j]));
    }
    return out;
}

// The entries of a message, in order. Throws ProtocolError: the columns do not fit together.
inline std::vector<Run> runs(const Tokens& message) {
    const auto streams = unpack<4>(message.streams), starts = unpack<4>(message.starts), ids = unpack<4>(message.ids);
    const std::size_t num = streams.size();
    auto counts = unpack<2>(message.counts), choices = unpack<2>(message.choices);
    if (message.counts.empty()) counts.assign(num, 1);
    if (message.choices.empty()) choices.assign(num, 0);
    std::size_t total = 0;
    for (const std::uint32_t count : counts) total += count;
    const bool has_texts = !message.texts.empty();
    if (starts.size() != num || counts.size() != num || choices.size() != num ||
        (has_texts && message.texts.size() != num) || total != ids.size()) {
        columns_differ();
    }
    std::vector<Run> out(num);
    auto at = ids.begin();
    for (std::size_t e = 0; e < num; ++e) {
        out[e] = Run{streams[e], choices[e], starts[e], {at, at + counts[e]}, has_texts ? message.texts[e] : "", {}, false};
        at += counts[e];
    }
    if (!message.logprobs) return out;
    const LogprobColumns& l = *message.logprobs;
    const auto entries = unpack<4>(l.entries);
    if (entries.size() != l.top.size()) columns_differ();
    std::size_t from = 0, from_top = 0;
    for (std::size_t i = 0; i < entries.size(); ++i) {
        if (entries[i] >= num) columns_differ();
        const std::size_t count = counts[entries[i]], top = static_cast<unsigned char>(l.top[i]);
        if (from > l.chosen.size() || from_top > l.top_ids.size() || from_top > l.top_logprobs.size()) columns_differ();
        out[entries[i]].logprobs =
            token_logprobs(std::string_view(l.chosen).substr(from, 4 * count),
                           std::string_view(l.top_ids).substr(from_top, 4 * count * top),
                           std::string_view(l.top_logprobs).substr(from_top, 4 * count * top), count, top);
        out[entries[i]].has_logprobs = true;
        from += 4 * count, from_top += 4 * count * top;
    }
    return out;
}

}  // namespace detail
}  // namespace pagewire
