// The errors of Pagewire, by the codes of the protocol.
//
//   Error                     "error"
//   ├── InvalidRequest        "invalid_request"   a field is missing, of the wrong type or out of range
//   │   ├── Unsupported       "unsupported"       a known field that this server or model cannot honour
//   │   ├── PromptTooLong     "prompt_too_long"   can never fit
//   │   └── UnknownStream     "unknown_stream"    names a stream that this client does not own
//   ├── ProtocolError         "protocol"          a frame that is no message, or one that is out of order
//   │   └── VersionMismatch   "version"           no protocol version in common
//   ├── Overloaded            "overloaded"        full; try again after `retry_after_ms`
//   │   └── SlowReader        "slow_reader"       tokens were not read in time; `resume` fetches them
//   ├── Draining              "draining"          the server is shutting down
//   ├── Unauthorized          "unauthorized"      key or capability refused
//   ├── Cancelled             "cancelled"         ended by its owner
//   ├── ConnectionLost        "connection_lost"   the server stopped answering
//   │   └── TakenOver         "taken_over"        the stream was resumed over another connection
//   ├── DeadlineExceeded      "deadline"          not done within the time asked for
//   ├── ModelError            "model"             a model that cannot be served
//   ├── ConfigError           "config"            a bad setting, or an address that is none
//   ├── NumericError          "numeric"           NaN or infinity in this request's logits
//   └── InternalError         "internal"          a fault of the server, of this request only
//       └── EngineFailed      "engine_failed"     the engine stopped or stalls
//           ├── EngineLost    "engine_lost"       the engine ended under an open stream
//           └── Unavailable   "unavailable"       no engine serves now; try again after `retry_after_ms`
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace pagewire {

// What an error says, apart from its class.
struct Fault {
    std::string code;
    std::string message;
    std::optional<std::string> field = std::nullopt;
    std::optional<std::int64_t> retry_after_ms = std::nullopt;
    std::optional<std::int64_t> predicted_ttft_ms = std::nullopt;
};

// Base of all errors that a user of Pagewire can meet. A code that this client does not know comes as this class.
class Error : public std::runtime_error {
  public:
    explicit Error(Fault fault)
        : std::runtime_error(fault.field ? *fault.field + ": " + fault.message : fault.message),
          fault_(std::move(fault)) {}

    const std::string& code() const noexcept { return fault_.code; }
    const std::string& message() const noexcept { return fault_.message; }
    // The offending field, as the caller knows it (`temperature`), or none.
    const std::optional<std::string>& field() const noexcept { return fault_.field; }
    // When to try again; none where trying again cannot help.
    const std::optional<std::int64_t>& retry_after_ms() const noexcept { return fault_.retry_after_ms; }
    // How long the first token would have taken, where that is why.
    const std::optional<std::int64_t>& predicted_ttft_ms() const noexcept { return fault_.predicted_ttft_ms; }
    const Fault& fault() const noexcept { return fault_; }

  private:
    Fault fault_;
};

// clang-format off
struct InvalidRequest : Error { using Error::Error; };
struct Unsupported : InvalidRequest { using InvalidRequest::InvalidRequest; };
struct PromptTooLong : InvalidRequest { using InvalidRequest::InvalidRequest; };
struct UnknownStream : InvalidRequest { using InvalidRequest::InvalidRequest; };
struct ProtocolError : Error { using Error::Error; };
struct VersionMismatch : ProtocolError { using ProtocolError::ProtocolError; };
struct Overloaded : Error { using Error::Error; };
struct SlowReader : Overloaded { using Overloaded::Overloaded; };
struct Draining : Error { using Error::Error; };
struct Unauthorized : Error { using Error::Error; };
struct Cancelled : Error { using Error::Error; };
struct ConnectionLost : Error { using Error::Error; };
struct TakenOver : ConnectionLost { using ConnectionLost::ConnectionLost; };
struct DeadlineExceeded : Error { using Error::Error; };
struct ModelError : Error { using Error::Error; };
struct ConfigError : Error { using Error::Error; };
struct NumericError : Error { using Error::Error; };
struct InternalError : Error { using Error::Error; };
struct EngineFailed : InternalError { using InternalError::InternalError; };
struct EngineLost : EngineFailed { using EngineFailed::EngineFailed; };
struct Unavailable : EngineFailed { using EngineFailed::EngineFailed; };
// clang-format on

// Throw the class that the fault's code names.
[[noreturn]] inline void raise(const Fault& fault) {
    const std::string& code = fault.code;
    if (code == "invalid_request") throw InvalidRequest(fault);
    if (code == "unsupported") throw Unsupported(fault);
    if (code == "prompt_too_long") throw PromptTooLong(fault);
    if (code == "unknown_stream") throw UnknownStream(fault);
    if (code == "protocol") throw ProtocolError(fault);
    if (code == "version") throw VersionMismatch(fault);
    if (code == "overloaded") throw Overloaded(fault);
    if (code == "slow_reader") throw SlowReader(fault);
    if (code == "draining") throw Draining(fault);
    if (code == "unauthorized") throw Unauthorized(fault);
    if (code == "cancelled") throw Cancelled(fault);
    if (code == "connection_lost") throw ConnectionLost(fault);
    if (code == "taken_over") throw TakenOver(fault);
    if (code == "deadline") throw DeadlineExceeded(fault);
    if (code == "model") throw ModelError(fault);
    if (code == "config") throw ConfigError(fault);
    if (code == "numeric") throw NumericError(fault);
    if (code == "internal") throw InternalError(fault);
    if (code == "engine_failed") throw EngineFailed(fault);
    if (code == "engine_lost") throw EngineLost(fault);
    if (code == "unavailable") throw Unavailable(fault);
    throw Error(fault);
}

}  // namespace pagewire
