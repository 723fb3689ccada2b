// One connection to a server, watched: a DEALER and its monitor. Used by one thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include <zmq.hpp>

#include "errors.hpp"
#include "messages.hpp"
#include "servers.hpp"

namespace pagewire::detail {

// A new one is made for each new connection, so that nothing of an old one reaches the streams of a new one.
class Connection {
  public:
    // `retries`: first and longest pause between attempts where nobody listens.
    // Throws ConfigError: the URL is no endpoint, or the keys are none.
    Connection(zmq::context_t& context, const std::string& url, const std::optional<CurveKeys>& curve,
               const std::pair<std::chrono::milliseconds, std::chrono::milliseconds>& retries)
        : dealer_(context, zmq::socket_type::dealer), monitor_(context, zmq::socket_type::pair), has_keys_(curve) {
        static std::atomic<unsigned> counter{0};
        const std::string watch = "inproc://pagewire-monitor-" + std::to_string(counter++);
        dealer_.set(zmq::sockopt::linger, 0);
        monitor_.set(zmq::sockopt::linger, 0);
        dealer_.set(zmq::sockopt::reconnect_ivl, static_cast<int>(retries.first.count()));
        dealer_.set(zmq::sockopt::reconnect_ivl_max, static_cast<int>(retries.second.count()));
        dealer_.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(2 * max_reply_bytes));
        if (url.find('[') != std::string::npos) dealer_.set(zmq::sockopt::ipv6, true);
        const char* field = "curve";
        try {
            if (curve) {
                dealer_.set(zmq::sockopt::curve_serverkey, curve->server_key.c_str());
                dealer_.set(zmq::sockopt::curve_publickey, curve->public_key.c_str());
                dealer_.set(zmq::sockopt::curve_secretkey, curve->secret_key.c_str());
            }
            field = "url";
            zmq_socket_monitor(dealer_.handle(), watch.c_str(), watched);
            monitor_.connect(watch);
            dealer_.connect(url);
        } catch (const zmq::error_t& error) {
            throw ConfigError({"config", field == std::string("url") ? url + " is no endpoint" : error.what(), field});
        }
    }

    ~Connection() { zmq_socket_monitor(dealer_.handle(), nullptr, 0); }
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    zmq::socket_t& dealer() { return dealer_; }
    zmq::socket_t& monitor() { return monitor_; }

    // False: there is no connection, or as many frames wait as may wait. Without a connection they would wait inside, and
    // be lost with the socket.
    bool try_send(const std::string& frame) {
        return is_connected_ && dealer_.send(zmq::buffer(frame), zmq::send_flags::dontwait).has_value();
    }

    // A message of more than one part becomes an empty frame, which is none.
    bool try_receive(zmq::message_t& frame) {
        if (!dealer_.recv(frame, zmq::recv_flags::dontwait)) return false;
        while (frame.more()) {
            if (!dealer_.recv(frame, zmq::recv_flags::dontwait)) break;
            if (!frame.more()) frame.rebuild();
        }
        return true;
    }

    // Look at what libzmq says of the connection. Whether one that was there broke.
    bool look() {
        bool is_broken = false;
        zmq::message_t event;
        while (monitor_.recv(event, zmq::recv_flags::dontwait)) {
            std::uint16_t number = 0;
            if (event.size() >= sizeof number) std::memcpy(&number, event.data(), sizeof number);
            while (event.more() && monitor_.recv(event, zmq::recv_flags::dontwait)) continue;
            is_broken = note(number) || is_broken;
        }
        return is_broken;
    }

    bool is_connected() const { return is_connected_; }

    // Somebody took the connection and closed it before a word: a server that starts or ends, or a proxy with none behind it.
    bool has_failed() const { return has_failed_ && !is_connected_; }

    // Why the server does not let us connect, if so.
    const std::string& denied() const { return denied_; }

    // What it means where connections fail time after time.
    std::string why_failed() const {
        return has_keys_ ? "the server's key is another one, or it has none" : "the server asks for keys (curve)";
    }

  private:
    static constexpr int watched = ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_HANDSHAKE_SUCCEEDED |
                                   ZMQ_EVENT_HANDSHAKE_FAILED_AUTH | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                                   ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL;

    bool note(std::uint16_t event) {
        if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
            is_connected_ = true;
        } else if (event == ZMQ_EVENT_DISCONNECTED) {
            has_failed_ = !is_connected_;
            return std::exchange(is_connected_, false);
        } else if (event == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH) {
            denied_ = "our key is not on the server's list";
        } else if (event == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL) {
            denied_ = why_failed();
        }
        return false;  // a failure without a detail is followed by a disconnection
    }

    zmq::socket_t dealer_, monitor_;
    const bool has_keys_;
    bool is_connected_ = false, has_failed_ = false;
    std::string denied_;
};

}  // namespace pagewire::detail
