// What the client keeps of a stream: fed by the client's thread, read by the user's handle, under the client's lock.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "request.hpp"
#include "result.hpp"

namespace pagewire::detail {

using Clock = std::chrono::steady_clock;

inline std::int64_t nanoseconds(Clock::duration duration) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

// Bounded: at most `max_tokens` tokens a choice, read or not.
class StreamState {
  public:
    // `received`: for each choice how many tokens are there already; zeros for a new stream.
    StreamState(std::uint32_t number_, const std::vector<std::uint32_t>& received, Ticket ticket = {})
        : number(number_), ticket_(std::move(ticket)) {
        for (const std::uint32_t base : received) {
            Choice& choice = choices_.emplace_back();
            choice.base = choice.read = base;
        }
    }

    const std::uint32_t number;
    std::condition_variable changed;
    std::optional<Accepted> accepted;
    std::optional<Fault> fault;
    std::deque<Chunk> chunks;
    std::vector<TokenLogprob> prompt_logprobs;
    // Its connection broke, and it was not accepted on a new one yet; when that is given up, and when it is tried again.
    bool is_resuming = false;
    Clock::time_point resume_by, retry_at;
    bool is_cancelled = false;
    bool is_abandoned = false;  // nobody reads chunks any more

    bool is_over() const { return done_ || fault; }

    // The next chunk; there must be one.
    Chunk take() {
        Chunk chunk = std::move(chunks.front());
        chunks.pop_front();
        choices_[chunk.choice].read = static_cast<std::uint32_t>(chunk.index) + static_cast<std::uint32_t>(chunk.token_ids.size());
        return chunk;
    }

    // The user ends a choice after `count` tokens; the server may not hear of it.
    void end_at(std::int64_t choice, std::int64_t count) {
        if (choice >= 0 && static_cast<std::size_t>(choice) < choices_.size()) choices_[choice].end = count;
    }

    // Choices that the user ended and the server has not, with where: they are told again over a new connection.
    std::vector<std::pair<std::int64_t, std::int64_t>> unanswered_ends() const {
        std::vector<std::pair<std::int64_t, std::int64_t>> out;
        for (std::size_t i = 0; i < choices_.size(); ++i) {
            const Choice& choice = choices_[i];
            if (choice.end && choice.result.finish_reason.empty()) out.emplace_back(static_cast<std::int64_t>(i), *choice.end);
        }
        return out;
    }

    // How the user goes on with it: what was not read yet comes again.
    Ticket user_ticket() const {
        Ticket out = ticket();
        for (std::size_t i = 0; i < choices_.size(); ++i) out.received[i] = choices_[i].read;
        return out;
    }

    // How the client goes on with it; an empty key where that is not possible (yet).
    Ticket ticket() const {
        Ticket out = accepted ? Ticket{accepted->request_id, accepted->resume_key, {}} : ticket_;
        out.received.clear();
        for (const Choice& choice : choices_) out.received.push_back(choice.known());
        return out;
    }

    void add(Run run) {
        Choice& choice = at(run.choice);
        if (run.start != choice.known()) {
            throw ProtocolError({"protocol", "tokens from " + std::to_string(run.start) + " follow " +
                                                 std::to_string(choice.known()) + " tokens"});
        }
        if (!run.ids.empty()) {
            const auto now = Clock::now();
            if (!first_) first_ = now;
            if (choice.heard) gaps_.push_back(nanoseconds(now - *choice.heard));
            gaps_.insert(gaps_.end(), run.ids.size() - 1, 0);
            choice.heard = now;
            choice.result.token_ids.insert(choice.result.token_ids.end(), run.ids.begin(), run.ids.end());
        }
        auto& logprobs = choice.result.logprobs;
        logprobs.insert(logprobs.end(), run.logprobs.begin(), run.logprobs.end());
        choice.result.text += run.text;
        give({std::move(run.text), std::move(run.ids), run.start, run.choice, std::move(run.logprobs)});
    }

    void finish(const Finished& message) {
        Choice& choice = at(static_cast<std::uint32_t>(message.choice));
        if (!choice.result.finish_reason.empty()) return;  // told again, after a resume
        if (message.num_tokens > choice.known()) throw ProtocolError({"protocol", "tokens are missing at the end"});
        // Cut by `finish`: what came after the cut does not count.
        const auto keep = static_cast<std::size_t>(std::max<std::int64_t>(0, message.num_tokens - choice.base));
        choice.result.token_ids.resize(keep);
        choice.result.logprobs.resize(std::min(keep, choice.result.logprobs.size()));
        choice.result.finish_reason = message.reason, choice.result.stop = message.stop;
        choice.result.text += message.text;
        if (!message.text.empty()) {
            give({message.text, {}, message.num_tokens, static_cast<std::uint32_t>(message.choice), {}});
        }
    }

    void end(const Done& message) {
        for (const Choice& choice : choices_) {
            if (choice.result.finish_reason.empty()) throw ProtocolError({"protocol", "a stream ended before its choices"});
        }
        done_ = message, over_ = Clock::now();
        changed.notify_all();
    }

    // It is over, with an error. What came before can still be read. Idempotent.
    void fail(Fault why) {
        if (!is_over()) fault = std::move(why);
        changed.notify_all();
    }

    // Only after `end`.
    Result result() const {
        Result out;
        for (const Choice& choice : choices_) out.choices.push_back(choice.result);
        static_cast<ChoiceResult&>(out) = out.choices.front();
        out.request_id = ticket().request_id;
        out.usage = done_->usage, out.seed = done_->seed, out.prompt_logprobs = prompt_logprobs;
        auto gaps = gaps_;
        std::sort(gaps.begin(), gaps.end());
        const auto share = [&](double part) -> std::optional<std::int64_t> {
            if (gaps.empty()) return std::nullopt;
            return gaps[static_cast<std::size_t>(std::max(0.0, std::ceil(part * static_cast<double>(gaps.size())) - 1))];
        };
        out.timings = {std::nullopt, share(0.50), share(0.95), share(0.99), nanoseconds(over_ - started_), done_->timings};
        if (first_) out.timings.ttft_ns = nanoseconds(*first_ - started_);
        return out;
    }

  private:
    struct Choice {
        std::uint32_t base = 0;  // tokens that were there before, where the stream was resumed from a ticket
        std::uint32_t read = 0;  // tokens that the user has: those, and what was read since
        ChoiceResult result;
        std::optional<Clock::time_point> heard;
        std::optional<std::int64_t> end;  // after so many tokens the user ended it

        std::uint32_t known() const { return base + static_cast<std::uint32_t>(result.token_ids.size()); }
    };

    Choice& at(std::uint32_t number_) {
        if (number_ >= choices_.size()) throw ProtocolError({"protocol", "a choice that was not asked for"});
        return choices_[number_];
    }

    void give(Chunk chunk) {
        if (is_abandoned) return;
        chunks.push_back(std::move(chunk));
        changed.notify_all();
    }

    const Ticket ticket_;
    std::vector<Choice> choices_;
    std::vector<std::int64_t> gaps_;
    const Clock::time_point started_ = Clock::now();
    std::optional<Clock::time_point> first_;
    Clock::time_point over_;
    std::optional<Done> done_;
};

}  // namespace pagewire::detail
