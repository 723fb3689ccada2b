// Client for Pagewire, a serving runtime for large language models: tokens streamed over ZeroMQ.
//
//   pagewire::Client client = pagewire::connect();
//   for (const pagewire::Chunk& chunk : client.generate("Once upon a time")) std::cout << chunk.text;
//
// Every function may be called from any thread; those that wait say so.
#pragma once

#include <chrono>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core.hpp"
#include "errors.hpp"
#include "messages.hpp"
#include "request.hpp"
#include "result.hpp"
#include "servers.hpp"

namespace pagewire {

// The handle of a running request. Chunks by `for` or `next`, the whole by `result`; both may be used.
//
// The end of its life cancels the request on the server, unless that is over: leaving a loop over a temporary early
// (`for (… : client.generate(…))`) cancels at once. A stream with a name outlives its loop and can be read on.
// What is not read is kept: at most `max_tokens` tokens a choice.
class Stream {
  public:
    // For `for`; reads each chunk once.
    class iterator {
      public:
        using iterator_category = std::input_iterator_tag;
        using value_type = Chunk;
        using difference_type = std::ptrdiff_t;
        using pointer = const Chunk*;
        using reference = const Chunk&;

        iterator() = default;
        explicit iterator(Stream* stream) : stream_(stream) { ++*this; }
        reference operator*() const { return *chunk_; }
        pointer operator->() const { return &*chunk_; }
        iterator& operator++() {
            chunk_ = stream_->next();
            if (!chunk_) stream_ = nullptr;
            return *this;
        }
        void operator++(int) { ++*this; }
        friend bool operator==(const iterator& a, const iterator& b) { return a.stream_ == b.stream_; }
        friend bool operator!=(const iterator& a, const iterator& b) { return a.stream_ != b.stream_; }

      private:
        Stream* stream_ = nullptr;
        std::optional<Chunk> chunk_;
    };

    Stream(std::shared_ptr<detail::Core> core, std::shared_ptr<detail::StreamState> state)
        : core_(std::move(core)), state_(std::move(state)) {}
    Stream(Stream&&) noexcept = default;
    Stream& operator=(Stream&& other) noexcept {
        abandon();
        core_ = std::move(other.core_), state_ = std::move(other.state_);
        return *this;
    }
    ~Stream() { abandon(); }

    iterator begin() { return iterator(this); }
    iterator end() { return iterator(); }

    // Wait for the next chunk; none at the end. Throws Error: the request was refused or failed, after all chunks that
    // came before.
    std::optional<Chunk> next() {
        detail::Lock lock(core_->mutex);
        state_->changed.wait(lock, [&] { return !state_->chunks.empty() || state_->is_over(); });
        if (!state_->chunks.empty()) return state_->take();
        if (state_->fault) raise(*state_->fault);
        return std::nullopt;
    }

    // Wait for the end. A stream that was cancelled has a result, too: what came, with that finish reason.
    // Throws Error: the request was refused or failed.
    Result result() {
        detail::Lock lock(core_->mutex);
        state_->changed.wait(lock, [&] { return state_->is_over(); });
        if (state_->fault) raise(*state_->fault);
        return state_->result();
    }

    // The server's name for it; empty until it was accepted.
    std::string request_id() const { return ticket().value_or(Ticket{}).request_id; }

    // How to go on with it from another process, after the chunks that were read: see `Client::resume`. None until it was accepted, and where it cannot be.
    std::optional<Ticket> ticket() const {
        detail::Lock lock(core_->mutex);
        Ticket ticket = state_->user_ticket();
        return ticket.resume_key.empty() ? std::nullopt : std::optional(std::move(ticket));
    }

    // Ask the server to end it. What comes until then can be read. Idempotent.
    void cancel() {
        detail::Lock lock(core_->mutex);
        core_->cancel(*state_);
    }

    // End a choice as stopped after its first `at` tokens; for those who look for stops in the text themselves.
    void finish(std::int64_t at, std::int64_t choice = 0) {
        detail::Lock lock(core_->mutex);
        state_->end_at(choice, at);
        core_->tell_of(*state_, detail::finish(state_->number, choice, at).frame());
    }

    // Let the server generate nothing more for now, or go on.
    void pause(bool is_paused = true) {
        detail::Lock lock(core_->mutex);
        core_->tell_of(*state_, detail::pause(state_->number, is_paused).frame());
    }

  private:
    void abandon() {
        if (!state_) return;
        detail::Lock lock(core_->mutex);
        state_->is_abandoned = true;
        state_->chunks.clear();
        core_->cancel(*state_);
    }

    std::shared_ptr<detail::Core> core_;
    std::shared_ptr<detail::StreamState> state_;
};

struct ConnectOptions {
    // How long to wait for the server's welcome. Default: 10 s where a server is, no time where an ipc socket is dead.
    std::optional<std::chrono::milliseconds> timeout;
    std::string name = "pagewire-cpp";  // for the server's logs
    std::optional<CurveKeys> curve;     // for a server that asks for keys
    // How long open streams wait for a connection that broke; 0: they end with it.
    std::chrono::milliseconds resume_timeout{30000};
};

// One connection to a server, any number of streams over it. Stays connected until `close`: when the connection breaks,
// a new one is made and open streams go on over it.
class Client {
  public:
    // Waits for the server's welcome; see `connect`.
    explicit Client(const std::string& url, ConnectOptions options = {}) {
        if (!options.timeout && detail::is_refused(url)) {
            throw ConnectionLost({"connection_lost", "no server answers at " + url + ": is it running?"});
        }
        core_ = std::make_shared<detail::Core>(url, options.name, options.curve, options.resume_timeout);
        core_->wait_welcome(options.timeout.value_or(std::chrono::seconds(10)));
    }
    Client(Client&&) noexcept = default;
    Client& operator=(Client&&) noexcept = default;
    ~Client() { close(); }

    // Leave: the server cancels what is open; waits half a second at most. With `keep_streams` they go on for the
    // server's grace time, for whoever resumes them by their tickets. Idempotent.
    void close(bool keep_streams = false) {
        if (core_) core_->close(!keep_streams);
    }

    // Start a stream: text, to a gateway.
    Stream generate(const std::string& prompt, const Options& options = {}) {
        detail::check_text(prompt, "prompt");
        return start(prompt.size(), "prompt", options,
                     [&](detail::MapWriter& map) { map.field("prompt", prompt); });
    }
    Stream generate(const char* prompt, const Options& options = {}) { return generate(std::string(prompt), options); }

    // Start a stream: token ids, which are taken as they are.
    Stream generate(const std::vector<std::uint32_t>& prompt_ids, const Options& options = {}) {
        return start(4 * prompt_ids.size(), "prompt_ids", options,
                     [&](detail::MapWriter& map) { map.bytes("prompt_ids", detail::pack_ids(prompt_ids)); });
    }

    // Start a stream that answers a conversation (gateway only).
    Stream chat(const std::vector<ChatMessage>& messages, const Options& options = {}) {
        std::size_t size = 0;
        for (const ChatMessage& turn : messages) size += turn.content.size() + turn.role.size() + 32;
        return start(size, "messages", options, [&](detail::MapWriter& map) { detail::put_messages(map, messages); });
    }

    // Go on with a stream that another process began, or that this one lost: with the tokens that `ticket.received`
    // leaves. One that is not kept any more fails with UnknownStream.
    Stream resume(const Ticket& ticket) {
        detail::Lock lock(core_->mutex);
        const std::uint32_t number = core_->take_number();
        auto state = std::make_shared<detail::StreamState>(number, ticket.received, ticket);
        core_->send(detail::resume(number, ticket).frame());
        return Stream(core_, core_->streams[number] = std::move(state));
    }

    // Who serves what, under which limits.
    ServerInfo info() const {
        detail::Lock lock(core_->mutex);
        return *core_->info;
    }

    // New streams would be taken, as far as is known; else why not.
    bool is_ready() const {
        detail::Lock lock(core_->mutex);
        return core_->is_ready;
    }
    std::string unready() const {
        detail::Lock lock(core_->mutex);
        return core_->unready;
    }

    // Counters and gauges of the server. These three wait for the answer, five seconds at most; then ConnectionLost.
    std::map<std::string, double> stats() { return ask<Stats>(detail::message("get_stats")).values; }

    // How busy the server is.
    Load load() { return ask<Load>(detail::message("get_load")); }

    // One of the files that `info().files` lists: the tokenizer's. Its SHA-256 is there for those who want to check it.
    std::string file(const std::string& name) {
        std::string whole;
        for (;;) {
            const FilePiece piece = ask<FilePiece>(detail::get_file(name, whole.size()));
            whole += piece.data;
            if (piece.data.empty() || whole.size() >= piece.size) return whole;
        }
    }

  private:
    static constexpr std::size_t overhead_bytes = 4096;  // of a message around its prompt

    template <typename Put>
    Stream start(std::size_t size, const char* field, const Options& options, Put put_prompt) {
        detail::Lock lock(core_->mutex);
        // The server would cut the connection over a message beyond its limit, and all its streams with it.
        if (size + overhead_bytes > static_cast<std::size_t>(core_->info->max_message_bytes)) {
            throw InvalidRequest({"invalid_request", "has " + std::to_string(size) + " bytes, too many for a message", field});
        }
        const std::uint32_t number = core_->take_number();
        detail::MapWriter map = detail::generate(number, options);
        put_prompt(map);
        const auto num = static_cast<std::size_t>(std::clamp<std::int64_t>(options.n.value_or(1), 1, 1024));
        auto state = std::make_shared<detail::StreamState>(number, std::vector<std::uint32_t>(num));
        core_->send(map.frame());
        return Stream(core_, core_->streams[number] = std::move(state));
    }

    template <typename Answer>
    Answer ask(const detail::MapWriter& question) {
        const std::size_t index = Message(Answer()).index();
        std::future<Message> answer;
        {
            detail::Lock lock(core_->mutex);
            answer = core_->ask(index, question.frame());
        }
        if (answer.wait_for(std::chrono::seconds(5)) != std::future_status::ready) {
            throw ConnectionLost({"connection_lost", "no answer from " + core_->url + " after 5 s"});
        }
        return std::get<Answer>(answer.get());
    }

    std::shared_ptr<detail::Core> core_;
};

// Connect to a gateway or an engine; without a URL to the newest server that this user runs on this machine. Waits for
// the server's welcome.
//
// Throws ConnectionLost: nobody answers there in time. ConfigError: the URL is no endpoint, or the keys are none.
// Other errors: the server lets nobody in now.
inline Client connect(const std::string& url = "", ConnectOptions options = {}) {
    return Client(url.empty() ? detail::find_url() : url, std::move(options));
}

}  // namespace pagewire
