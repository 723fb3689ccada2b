// The client's own thread: connects, watches, sends, receives, and feeds the streams.
//
//   pause ──▶ new socket ── hello ──▶ waiting ── welcome ──▶ welcomed ── ping … pong
//     ▲           │ not connected         │                       │
//     ├───────────┘                       │                       │
//     └────── lost: streams wait, or end with it ─────────────────┘
//             disconnected, silent for the heartbeat timeout, or not known to the server any more
//
// A hello is said again only after the one before was refused: each starts the connection anew, and what was asked between
// two is lost.
//
// Everything is under one lock, which the thread gives up while it waits in poll.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "backoff.hpp"
#include "link.hpp"
#include "request.hpp"
#include "state.hpp"

namespace pagewire::detail {

using Lock = std::unique_lock<std::mutex>;
using Milliseconds = std::chrono::milliseconds;

class Core {
  public:
    Core(std::string url_, std::string name, std::optional<CurveKeys> curve, Milliseconds resume_timeout)
        : url(std::move(url_)), hello_(hello(name).frame()), curve_(std::move(curve)), resume_timeout_(resume_timeout) {
        backoff_.next();  // the first attempt
        connect();
        if (pipe2(wake_, O_NONBLOCK | O_CLOEXEC) != 0) throw InternalError({"internal", "no pipe can be had"});
        thread_ = std::thread([this] { guarded_run(); });
    }
    ~Core() {
        close(true);
        ::close(wake_[0]), ::close(wake_[1]);
    }
    Core(const Core&) = delete;
    Core& operator=(const Core&) = delete;

    const std::string url;
    std::mutex mutex;
    std::optional<ServerInfo> info;  // of the latest connection
    bool is_ready = false;           // what the server's last pong said
    std::string unready;
    std::map<std::uint32_t, std::shared_ptr<StreamState>> streams;

    void wait_welcome(Milliseconds timeout) {
        Lock lock(mutex);
        const bool is_told = told_.wait_for(lock, timeout, [&] { return is_welcomed_ || refusal_ || !is_open_; });
        if (is_welcomed_) return;
        if (refusal_) raise(*refusal_);
        throw ConnectionLost({"connection_lost", is_told ? "the client was closed"
                                                         : "no server answers at " + url + " after " +
                                                               std::to_string(timeout.count()) + " ms: is it running?"});
    }

    // Say goodbye (unless told not to) and end the thread. Idempotent.
    void close(bool goodbye) {
        {
            Lock lock(mutex);
            if (is_open_) {
                is_open_ = false, says_goodbye_ = goodbye;
                fail_all({"connection_lost", "the client was closed"});
            }
        }
        wake();
        if (thread_.joinable()) thread_.join();
    }

    // The rest is called under the lock.

    // Throws ConnectionLost, Overloaded, or why the server does not let us in.
    void send(std::string frame) {
        if (!is_open_) throw ConnectionLost({"connection_lost", "the client was closed"});
        if (refusal_) raise(*refusal_);
        if (num_unsent_bytes_ + frame.size() > max_unsent_bytes) {
            throw Overloaded({"overloaded", "the server takes no messages now", std::nullopt, timeout_.count()});
        }
        num_unsent_bytes_ += frame.size();
        unsent_.push_back(std::move(frame));
        wake();
    }

    std::uint32_t take_number() {
        while (streams.count(next_) != 0) ++next_;
        return next_++;
    }

    void tell_of(StreamState& state, std::string frame) {
        if (state.is_over() || state.is_resuming) return;  // it follows the resume
        try {
            send(std::move(frame));
        } catch (const Error& error) {
            drop(state, error.fault());
        }
    }

    void cancel(StreamState& state) {
        if (state.is_cancelled || state.is_over()) return;
        state.is_cancelled = true;
        tell_of(state, message("cancel", state.number).frame());
    }

    // An answer of the type at `index` in `Message`; such answers come in the order of the questions.
    std::future<Message> ask(std::size_t index, std::string frame) {
        send(std::move(frame));
        return asked_.emplace_back(index, std::promise<Message>()).second.get_future();
    }

  private:
    static constexpr std::size_t max_unsent_bytes = 64u << 20;
    static constexpr Milliseconds look_for_resumes{20}, steady{1000};
    // Connections to a server that never let us in that fail in a row, after which that is taken for a refusal.
    static constexpr int max_failures = 4;

    // What goes wrong here (no more sockets, no memory) ends the streams, and not the process.
    void guarded_run() noexcept {
        std::string what = "unknown";
        try {
            return run();
        } catch (const std::exception& error) {
            what = error.what();
        } catch (...) {
        }
        Lock lock(mutex);
        is_open_ = false;
        refuse({"internal", "the client's thread ended: " + what});
        fail_all(*refusal_);
    }

    void run() {
        Lock lock(mutex);
        while (is_open_) {
            zmq::pollitem_t items[] = {
                {nullptr, wake_[0], ZMQ_POLLIN, 0},
                {connection_ ? connection_->dealer().handle() : nullptr, 0, events(), 0},
                {connection_ ? connection_->monitor().handle() : nullptr, 0, ZMQ_POLLIN, 0},
            };
            const auto due = connect_at_ ? std::min(*connect_at_, next_tick_) : next_tick_;
            const auto left = std::chrono::duration_cast<Milliseconds>(due - Clock::now()) + Milliseconds(1);
            const auto wait = std::clamp(left, Milliseconds(0), has_resuming() ? look_for_resumes : heartbeat_);
            lock.unlock();
            zmq::poll(items, connection_ ? 3 : 1, wait);
            char note[64];
            while (read(wake_[0], note, sizeof note) > 0) continue;
            lock.lock();
            if (connect_at_ && Clock::now() >= *connect_at_) connect();
            if (connection_) take();
            flush();
            if (Clock::now() >= next_tick_) tick();
            if (has_resuming()) look_at_resumes();
        }
        if (connection_ && is_welcomed_) {
            connection_->dealer().set(zmq::sockopt::linger, 500);
            flush();
            if (says_goodbye_) connection_->try_send(message("goodbye").frame());
        }
        connection_.reset();
        told_.notify_all();
    }

    short events() const {
        const bool wants_to_send = connection_ && connection_->is_connected() && !unsent_.empty();
        return static_cast<short>(wants_to_send ? ZMQ_POLLIN | ZMQ_POLLOUT : ZMQ_POLLIN);
    }

    void wake() {
        const char note = 0;
        [[maybe_unused]] const auto written = write(wake_[1], &note, 1);  // full: it wakes anyway
    }

    void connect() {
        connect_at_.reset();
        heard_ = Clock::now();
        connection_ = std::make_unique<Connection>(context_, url, curve_, backoff_.own_retries());
        was_connected_ = is_greeting_ = false;
    }

    // After a pause where there were attempts in vain. What is to be sent waits.
    void connect_later() {
        connection_.reset();
        connect_at_ = Clock::now() + backoff_.next();
    }

    void greet() { is_greeting_ = connection_->try_send(hello_); }

    // Frames first: those that came before a break are good.
    void take() {
        const bool is_broken = connection_->look();
        if (connection_->is_connected() && !std::exchange(was_connected_, connection_->is_connected())) {
            heard_ = Clock::now(), num_failed_ = 0;
            greet();
        }
        zmq::message_t frame;
        const Connection* taken = connection_.get();
        for (int i = 0; (is_broken || i < 256) && connection_.get() == taken && connection_->try_receive(frame); ++i) {
            on_frame(frame);
        }
        if (connection_.get() != taken) return;
        if (!connection_->denied().empty()) on_denied(connection_->denied());
        else if (is_broken) lost("the connection to " + url + " broke");
        else if (connection_->has_failed()) on_failed();
    }

    void on_failed() {
        if (++num_failed_ >= max_failures && !info) on_denied(connection_->why_failed());
        else connect_later();
    }

    void flush() {
        while (connection_ && !unsent_.empty() && connection_->try_send(unsent_.front())) {
            num_unsent_bytes_ -= unsent_.front().size();
            unsent_.pop_front();
        }
    }

    // Give the connection up and make another.
    void lost(const std::string& why) {
        if (is_welcomed_ && Clock::now() - welcomed_ >= steady) backoff_.reset();
        forget();
        refusal_.reset();
        on_lost({"connection_lost", why});
        connect_later();
    }

    // The server does not let us connect; it is tried again with the next heartbeat.
    void on_denied(const std::string& why) {
        const Fault denied{"unauthorized", "the server at " + url + " lets us not in: " + why};
        forget();
        num_failed_ = 0;
        refuse(denied);
        on_lost(denied);
    }

    void forget() {
        connection_.reset();
        unsent_.clear();
        num_unsent_bytes_ = 0;
        is_welcomed_ = is_ready = false;
    }

    void refuse(Fault fault) {
        refusal_ = std::move(fault);
        told_.notify_all();
    }

    void on_lost(const Fault& why) {
        for (auto it = streams.begin(); it != streams.end();) {
            StreamState& state = *it->second;
            if (state.ticket().resume_key.empty() || resume_timeout_.count() == 0) {
                state.fail(why);
                it = streams.erase(it);
                continue;
            }
            if (!state.is_resuming) state.resume_by = Clock::now() + resume_timeout_;
            state.is_resuming = true, state.retry_at = Clock::time_point::max();
            ++it;
        }
        fail_asked(why);
    }

    void fail_all(const Fault& why) {
        for (auto& [number, state] : streams) state->fail(why);
        streams.clear();
        fail_asked(why);
    }

    void fail_asked(const Fault& why) {
        for (auto& [index, promise] : asked_) promise.set_exception(std::make_exception_ptr(ConnectionLost(why)));
        asked_.clear();
    }

    void drop(StreamState& state, Fault why) {
        state.fail(std::move(why));
        streams.erase(state.number);  // last: it may hold the only reference
    }

    // Say that we live; find out whether the server does. After a tick that comes late (this process was stopped) nobody
    // is judged: the server's words may wait.
    void tick() {
        const auto now = Clock::now();
        const bool is_late = now - next_tick_ > heartbeat_;
        next_tick_ = now + heartbeat_;
        if (!connection_) {
            if (!connect_at_) connect();  // denied
            return;
        }
        if (!is_late && now - heard_ > timeout_) {
            return lost("the server at " + url + " was silent for " + std::to_string(timeout_.count()) + " ms");
        }
        if (is_welcomed_ && unsent_.empty()) connection_->try_send(message("ping").frame());
        else if (!is_welcomed_ && refusal_ && !is_greeting_) greet();
    }

    // ---- from the server --------------------------------------------------------------------------------------------

    void on_frame(const zmq::message_t& frame) {
        heard_ = Clock::now();
        Message message;
        try {
            message = decode(frame.data(), frame.size());
        } catch (const Error& error) {
            // What it said is unknown: tokens may be among it. No stream of this connection can be trusted any more.
            return lost(std::string("the server sent what is no message: ") + error.what());
        }
        if (auto* welcome = std::get_if<ServerInfo>(&message)) return on_welcome(std::move(*welcome));
        if (auto* pong = std::get_if<Pong>(&message)) {
            is_ready = pong->ready, unready = pong->reason;
            return;
        }
        if (auto* error = std::get_if<ErrorMessage>(&message)) return on_error(*error);
        if (auto* tokens = std::get_if<Tokens>(&message)) return on_tokens(*tokens);
        for (auto it = asked_.begin(); it != asked_.end(); ++it) {
            if (it->first != message.index()) continue;
            it->second.set_value(std::move(message));
            asked_.erase(it);
            return;
        }
        std::visit([this](const auto& known) { tell(known); }, message);
    }

    void on_welcome(ServerInfo welcome) {
        if (is_welcomed_) return lost("the server at " + url + " began this connection anew");
        is_greeting_ = false, welcomed_ = Clock::now();
        heartbeat_ = Milliseconds(std::max<std::int64_t>(1, welcome.heartbeat_ms));
        timeout_ = Milliseconds(welcome.heartbeat_timeout_ms);
        next_tick_ = Clock::now() + heartbeat_;
        info = std::move(welcome);
        is_welcomed_ = is_ready = true;
        unready.clear();
        refusal_.reset();
        told_.notify_all();
        for (auto& [number, state] : streams) {
            if (state->is_resuming) state->retry_at = Clock::now();
        }
        look_at_resumes();
    }

    void on_error(const ErrorMessage& message) {
        const bool is_unknown = message.fault.field == "hello";  // the server does not know this connection (any more)
        if (is_unknown && is_welcomed_) return lost("the server at " + url + " was restarted or gave this connection up");
        if (!is_welcomed_ && !is_unknown) {
            is_greeting_ = false;
            return refuse(message.fault);
        }
        const auto found = message.stream ? streams.find(*message.stream) : streams.end();
        if (found == streams.end()) return;  // a cancel that crossed its stream's end
        const std::shared_ptr<StreamState> state = found->second;
        Fault fault = is_unknown ? refusal_.value_or(Fault{"connection_lost", message.fault.message}) : message.fault;
        if (state->is_resuming) {
            const auto retry = Clock::now() + Milliseconds(fault.retry_after_ms.value_or(0));
            if (fault.retry_after_ms && retry < state->resume_by) {
                state->retry_at = retry;
                return;
            }
            if (fault.code == "unknown_stream" || fault.code == "unsupported") {
                fault = {"connection_lost", "the connection broke, and the stream is gone: " + fault.message};
            }
        }
        if (fault.field && fault.field->rfind("params.", 0) == 0) fault.field = fault.field->substr(7);  // as the caller wrote it
        drop(*state, std::move(fault));
    }

    void on_tokens(const Tokens& message) {
        std::vector<Run> entries;
        try {
            entries = runs(message);
        } catch (const ProtocolError& error) {  // whose tokens these were is not known
            while (!streams.empty()) distrust(*streams.begin()->second, error);
            return;
        }
        for (Run& run : entries) {
            guarded(run.stream, [&](StreamState& state) { state.add(std::move(run)); });
        }
    }

    template <typename Take>
    void guarded(std::uint32_t stream, Take take) {
        const auto found = streams.find(stream);
        if (found == streams.end()) return;
        const std::shared_ptr<StreamState> state = found->second;
        try {
            take(*state);
        } catch (const ProtocolError& error) {
            distrust(*state, error);
        }
    }

    // Its tokens are not complete: better an error than a wrong text.
    void distrust(StreamState& state, const ProtocolError& error) {
        cancel(state);
        if (!state.is_over()) drop(state, error.fault());
    }

    void tell(const Accepted& message) {
        guarded(message.stream, [&](StreamState& state) {
            state.accepted = message;
            state.is_resuming = false;
            state.changed.notify_all();
        });
    }
    void tell(const PromptLogprobs& message) {
        guarded(message.stream, [&](StreamState& state) {
            state.prompt_logprobs = token_logprobs(message.chosen, message.top_ids, message.top_logprobs,
                                                   message.chosen.size() / 4, static_cast<std::size_t>(message.top));
        });
    }
    void tell(const Finished& message) {
        guarded(message.stream, [&](StreamState& state) { state.finish(message); });
    }
    void tell(const Done& message) {
        guarded(message.stream, [&](StreamState& state) {
            state.end(message);
            streams.erase(message.stream);
        });
    }
    template <typename Other>
    void tell(const Other&) {}  // an answer that nobody waits for any more

    // ---- resuming ---------------------------------------------------------------------------------------------------

    bool has_resuming() const {
        return std::any_of(streams.begin(), streams.end(), [](const auto& item) { return item.second->is_resuming; });
    }

    void look_at_resumes() {
        const auto now = Clock::now();
        std::vector<std::shared_ptr<StreamState>> waiting;
        for (auto& [number, state] : streams) {
            if (state->is_resuming) waiting.push_back(state);
        }
        for (const auto& state : waiting) {
            if (state->resume_by < now) {
                drop(*state, {"connection_lost", "the connection to " + url + " broke and did not come back"});
            } else if (is_welcomed_ && state->retry_at <= now) {
                state->retry_at = Clock::time_point::max();
                try {
                    send(resume(state->number, state->ticket()).frame());
                    if (state->is_cancelled) send(message("cancel", state->number).frame());
                    for (const auto& [choice, at] : state->unanswered_ends()) {
                        send(finish(state->number, choice, at).frame());
                    }
                } catch (const Error& error) {
                    drop(*state, error.fault());
                }
            }
        }
    }

    const std::string hello_;
    const std::optional<CurveKeys> curve_;
    const Milliseconds resume_timeout_;
    zmq::context_t context_{1};
    Backoff backoff_;
    std::unique_ptr<Connection> connection_;
    std::optional<Clock::time_point> connect_at_;
    bool was_connected_ = false, is_greeting_ = false;  // of this connection; a hello that was not answered is under way
    int num_failed_ = 0;
    Clock::time_point welcomed_;
    int wake_[2] = {-1, -1};
    std::condition_variable told_;
    std::deque<std::string> unsent_;
    std::size_t num_unsent_bytes_ = 0;
    std::deque<std::pair<std::size_t, std::promise<Message>>> asked_;
    std::optional<Fault> refusal_;
    bool is_welcomed_ = false, is_open_ = true, says_goodbye_ = true;
    std::uint32_t next_ = 1;
    Milliseconds heartbeat_{1000}, timeout_{10000};
    Clock::time_point heard_ = Clock::now(), next_tick_ = Clock::now() + heartbeat_;
    std::thread thread_;  // last: it uses all of the above
};

}  // namespace pagewire::detail
