// One connection to a server, watched: a DEALER and its monitor. Used by one thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include <zmq.hpp>

#include "errors.hpp"
#include "messages.hpp"
#include "servers.hpp"

namespace pagewire::detail {

// A new one is made for each new connection, so that nothing of an old one reaches the streams of a new one.
class Connection {
  public:
    // Throws ConfigError: the URL is no endpoint, or the keys are none.
    Connection(zmq::context_t& context, const std::string& url, const std::optional<CurveKeys>& curve)
        : dealer_(context, zmq::socket_type::dealer), monitor_(context, zmq::socket_type::pair), has_keys_(curve) {
        static std::atomic<unsigned> counter{0};
        const std::string watch = "inproc://pagewire-monitor-" + std::to_string(counter++);
        dealer_.set(zmq::sockopt::linger, 0);
        monitor_.set(zmq::sockopt::linger, 0);
        dealer_.set(zmq::sockopt::reconnect_ivl, 50);
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

    // False: as many frames wait as may wait.
    bool try_send(const std::string& frame) {
        return dealer_.send(zmq::buffer(frame), zmq::send_flags::dontwait).has_value();
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

    // Why the server does not let us connect, if so.
    const std::string& denied() const { return denied_; }

  private:
    static constexpr int watched = ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_HANDSHAKE_SUCCEEDED |
                                   ZMQ_EVENT_HANDSHAKE_FAILED_AUTH | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                                   ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL;
    // Handshakes that fail without a reason in a row, after which it is taken for a refusal.
    static constexpr int max_failures = 5;

    bool note(std::uint16_t event) {
        if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
            is_connected_ = true, num_failed_ = 0;
        } else if (event == ZMQ_EVENT_DISCONNECTED) {
            const bool was_connected = is_connected_;
            is_connected_ = false;
            return was_connected;
        } else if (event == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH) {
            denied_ = "our key is not on the server's list";
        } else if (event == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL || ++num_failed_ >= max_failures) {
            // Without a detail it may be a server that is just starting or ending: libzmq tries again by itself.
            denied_ = has_keys_ ? "the server's key is another one, or it has none" : "the server asks for keys (curve)";
        }
        return false;
    }

    zmq::socket_t dealer_, monitor_;
    const bool has_keys_;
    bool is_connected_ = false;
    int num_failed_ = 0;
    std::string denied_;
};

}  // namespace pagewire::detail
