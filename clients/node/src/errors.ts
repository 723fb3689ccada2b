/**
 * The errors of Pagewire, by the codes of the protocol.
 *
 *     PagewireError                 "error"
 *     ├── InvalidRequest            "invalid_request"   a field is missing, of the wrong type or out of range
 *     │   ├── UnsupportedFeature    "unsupported"       a known field that this server or model cannot honour
 *     │   ├── PromptTooLong         "prompt_too_long"   can never fit
 *     │   └── UnknownStream         "unknown_stream"    names a stream that this client does not own
 *     ├── ProtocolError             "protocol"          a frame that is no message, or one that is out of order
 *     │   └── VersionMismatch       "version"           no protocol version in common
 *     ├── Overloaded                "overloaded"        full; try again after `retryAfterMs`
 *     │   └── SlowReader            "slow_reader"       tokens were not read in time; `resume` fetches them
 *     ├── Draining                  "draining"          the server is shutting down
 *     ├── Unauthorized              "unauthorized"      key or capability refused
 *     ├── Cancelled                 "cancelled"         ended by its owner
 *     ├── ConnectionLost            "connection_lost"   the server stopped answering
 *     │   └── TakenOver             "taken_over"        the stream was resumed over another connection
 *     ├── DeadlineExceeded          "deadline"          not done within the time asked for
 *     ├── ModelError                "model"             a model that cannot be served
 *     ├── ConfigError               "config"            a bad setting, or an address that is none
 *     ├── NumericError              "numeric"           NaN or infinity in this request's logits
 *     └── InternalError             "internal"          a fault of the server, of this request only
 *         └── EngineFailed          "engine_failed"     the engine stopped or stalls
 *             ├── EngineLost        "engine_lost"       the engine ended under an open stream
 *             └── Unavailable       "unavailable"       no engine serves now; try again after `retryAfterMs`
 */

export interface ErrorDetails {
  /** The offending field, as the caller wrote it, or undefined. */
  field?: string | undefined;
  /** When to try again; undefined where trying again cannot help. */
  retryAfterMs?: number | undefined;
  /** How long the first token would have taken, where a request was refused for that. */
  predictedTtftMs?: number | undefined;
}

/** Base of all errors that a user of Pagewire can meet. */
export class PagewireError extends Error {
  static readonly code: string = 'error';

  /** Of the protocol; a code that this client does not know comes as the base class. */
  readonly code: string;
  /** The message without the field. */
  readonly reason: string;
  readonly field: string | undefined;
  readonly retryAfterMs: number | undefined;
  readonly predictedTtftMs: number | undefined;

  constructor(message: string, details: ErrorDetails = {}, code?: string) {
    super(details.field === undefined ? message : `${details.field}: ${message}`);
    this.name = new.target.name;
    this.reason = message;
    this.code = code ?? new.target.code;
    this.field = details.field;
    this.retryAfterMs = details.retryAfterMs;
    this.predictedTtftMs = details.predictedTtftMs;
  }
}

export class InvalidRequest extends PagewireError {
  static override readonly code: string = 'invalid_request';
}
export class UnsupportedFeature extends InvalidRequest {
  static override readonly code = 'unsupported';
}
export class PromptTooLong extends InvalidRequest {
  static override readonly code = 'prompt_too_long';
}
export class UnknownStream extends InvalidRequest {
  static override readonly code = 'unknown_stream';
}
export class ProtocolError extends PagewireError {
  static override readonly code: string = 'protocol';
}
export class VersionMismatch extends ProtocolError {
  static override readonly code = 'version';
}
export class Overloaded extends PagewireError {
  static override readonly code: string = 'overloaded';
}
export class SlowReader extends Overloaded {
  static override readonly code = 'slow_reader';
}
export class Draining extends PagewireError {
  static override readonly code = 'draining';
}
export class Unauthorized extends PagewireError {
  static override readonly code = 'unauthorized';
}
export class Cancelled extends PagewireError {
  static override readonly code = 'cancelled';
}
export class ConnectionLost extends PagewireError {
  static override readonly code: string = 'connection_lost';
}
export class TakenOver extends ConnectionLost {
  static override readonly code = 'taken_over';
}
export class DeadlineExceeded extends PagewireError {
  static override readonly code = 'deadline';
}
export class ModelError extends PagewireError {
  static override readonly code = 'model';
}
export class ConfigError extends PagewireError {
  static override readonly code = 'config';
}
export class NumericError extends PagewireError {
  static override readonly code = 'numeric';
}
export class InternalError extends PagewireError {
  static override readonly code: string = 'internal';
}
export class EngineFailed extends InternalError {
  static override readonly code: string = 'engine_failed';
}
export class EngineLost extends EngineFailed {
  static override readonly code = 'engine_lost';
}
export class Unavailable extends EngineFailed {
  static override readonly code = 'unavailable';
}

const BY_CODE = new Map<string, typeof PagewireError>(
  [
    PagewireError, InvalidRequest, UnsupportedFeature, PromptTooLong, UnknownStream, ProtocolError, VersionMismatch,
    Overloaded, SlowReader, Draining, Unauthorized, Cancelled, ConnectionLost, TakenOver, DeadlineExceeded, ModelError,
    ConfigError, NumericError, InternalError, EngineFailed, EngineLost, Unavailable,
  ].map((kind) => [kind.code, kind]),
);

/** The error that a code names; an unknown code (a newer server) becomes the base class and keeps its code. */
export function fromCode(code: string, message: string, details: ErrorDetails = {}): PagewireError {
  return new (BY_CODE.get(code) ?? PagewireError)(message, details, code);
}
