/**
 * The messages of the protocol, version 1; `transport/PROTOCOL.md` describes each.
 *
 * A schema names the fields of a message as they go over the wire, with a reader for each. The types are made from the
 * schemas, so that what is checked and what the compiler believes are one thing.
 */

import { ProtocolError } from './errors.js';

export const PROTOCOL_VERSION = 1;
export const MAX_STREAM = 2 ** 32 - 1;

/** The value of a field, or of one that is absent (undefined); throws a ProtocolError for one of another type. */
export type Reader<T> = (value: unknown) => T;
export type Schema = Record<string, Reader<unknown>>;
export type Shape<S extends Schema> = { [K in keyof S]: ReturnType<S[K]> };

/** A message to the server: its fields as they go over the wire. A field that is undefined is left out. */
export type FromClient = { t: string } & Record<string, unknown>;

// ---- readers --------------------------------------------------------------------------------------------------------

function refuse(value: unknown): never {
  throw new ProtocolError(value === undefined || value === null ? 'is missing' : 'is of the wrong type');
}

const text: Reader<string> = (value) => (typeof value === 'string' ? value : refuse(value));
const flag: Reader<boolean> = (value) => (typeof value === 'boolean' ? value : refuse(value));
const bytes: Reader<Uint8Array> = (value) => (value instanceof Uint8Array ? value : refuse(value));
const real: Reader<number> = (value) =>
  typeof value === 'number' || typeof value === 'bigint' ? Number(value) : refuse(value);
/** Up to 2^53; beyond it the nearest number, which is good enough for counts and nanoseconds. */
const int: Reader<number> = (value) =>
  typeof value === 'bigint' || Number.isInteger(value) ? Number(value) : refuse(value);
/** Exact up to 2^64. */
const long: Reader<bigint> = (value) =>
  typeof value === 'bigint' || Number.isInteger(value) ? BigInt(value as bigint | number) : refuse(value);
const textOrInt: Reader<string | number> = (value) => (typeof value === 'string' ? value : int(value));

function oneOf<T extends string>(...words: T[]): Reader<T> {
  return (value) => words.find((word) => word === value) ?? refuse(value);
}

function listOf<T>(item: Reader<T>): Reader<T[]> {
  return (value) => (Array.isArray(value) ? value.map((each) => item(each)) : refuse(value));
}

function valuesOf<T>(item: Reader<T>): Reader<Record<string, T>> {
  return (value) => Object.fromEntries(Object.entries(asMap(value)).map(([key, each]) => [key, item(each)]));
}

/** Absent: `absent`. */
function or<T>(reader: Reader<T>, absent: T): Reader<T> {
  return (value) => (value === undefined ? absent : reader(value));
}

/** Absent or nil: null. */
function maybe<T>(reader: Reader<T>): Reader<T | null> {
  return (value) => (value === undefined || value === null ? null : reader(value));
}

/** A map with these fields; others are skipped, since a newer server may say more. */
export function struct<S extends Schema>(schema: S): Reader<Shape<S>> {
  return (value) => {
    const map = asMap(value);
    const shape: Record<string, unknown> = {};
    for (const [name, reader] of Object.entries(schema)) {
      try {
        shape[name] = reader(Object.hasOwn(map, name) ? map[name] : undefined);
      } catch (error) {
        if (!(error instanceof ProtocolError)) throw error;
        const field = error.field === undefined ? name : `${name}.${error.field}`;
        throw new ProtocolError(error.reason, { field });
      }
    }
    return shape as Shape<S>;
  };
}

function asMap(value: unknown): Record<string, unknown> {
  const isMap = typeof value === 'object' && value !== null && !Array.isArray(value) && !ArrayBuffer.isView(value);
  return isMap ? (value as Record<string, unknown>) : refuse(value);
}

const NONE = new Uint8Array(0);

// ---- server → client ------------------------------------------------------------------------------------------------

const file = { name: text, size: int, sha256: text };

const limits = {
  max_n: or(int, 16),
  max_stop_strings: or(int, 16),
  max_stop_chars: or(int, 256),
  max_stop_token_ids: or(int, 64),
  max_logit_bias: or(int, 300),
  max_top_logprobs: or(int, 20),
  max_messages: or(int, 16_384),
  max_template_kwargs: or(int, 64),
  max_file_piece: or(int, 65_536),
  max_offences: or(int, 8),
};

const logprobColumns = {
  entries: bytes, // uint32 × entries
  top: bytes, // uint8 × entries
  chosen: bytes, // float32 × tokens
  top_ids: or(bytes, NONE), // uint32
  top_logprobs: or(bytes, NONE), // float32
};

const finishReason = oneOf('stop', 'length', 'cancelled', 'error');

const usage = { prompt: int, completion: int, cached: or(int, 0) };
const timings = { queue_ns: int, first_token_ns: int, total_ns: int, num_preemptions: or(int, 0) };

/** By the tag `t`. */
export const SCHEMAS = {
  welcome: {
    version: int,
    role: oneOf('engine', 'gateway'),
    server: text,
    model: text,
    vocab_size: int,
    max_model_len: int,
    max_streams: int,
    max_message_bytes: int,
    heartbeat_ms: int,
    heartbeat_timeout_ms: int,
    eos_ids: or(listOf(int), []),
    versions: or(listOf(int), [PROTOCOL_VERSION]),
    limits: or(struct(limits), struct(limits)({})),
    files: or(listOf(struct(file)), []),
  },
  accepted: {
    stream: int,
    request_id: text,
    seed: long,
    num_prompt_tokens: int,
    max_tokens: int,
    resume_key: or(text, ''),
    prompt_ids: or(bytes, NONE), // for gateways, as the next two
    output_ids: or(listOf(bytes), []),
    memo: or(bytes, NONE),
  },
  tokens: {
    streams: bytes, // uint32 × entries
    starts: bytes, // uint32 × entries
    ids: bytes, // uint32 × sum of counts
    counts: or(bytes, NONE), // uint16 × entries; empty: all 1
    choices: or(bytes, NONE), // uint16 × entries; empty: all 0
    texts: or(listOf(text), []),
    logprobs: maybe(struct(logprobColumns)),
  },
  prompt_logprobs: {
    stream: int,
    top: int,
    chosen: bytes, // float32 × (P − 1)
    top_ids: or(bytes, NONE), // uint32 × (P − 1) × top
    top_logprobs: or(bytes, NONE), // float32 × (P − 1) × top
  },
  finished: {
    stream: int,
    choice: or(int, 0),
    reason: finishReason,
    num_tokens: int,
    stop: maybe(textOrInt),
    text: or(text, ''),
  },
  done: { stream: int, seed: long, usage: struct(usage), timings: struct(timings) },
  error: {
    code: text,
    message: text,
    stream: maybe(int),
    field: maybe(text),
    retry_after_ms: maybe(int),
    predicted_ttft_ms: maybe(int),
  },
  pong: { nonce: or(long, 0n), ready: or(flag, true), reason: or(text, '') },
  stats: { values: valuesOf(real) },
  load: { ready: flag, running: int, waiting: int, kv_blocks: int, kv_blocks_used: int },
  file_piece: { name: text, offset: int, data: bytes, size: int },
  admin_done: { what: text, message: or(text, '') },
} satisfies Record<string, Schema>;

type Schemas = typeof SCHEMAS;
export type Message<T extends keyof Schemas> = T extends keyof Schemas ? { t: T } & Shape<Schemas[T]> : never;
/** Every message of a server, told apart by `t`. */
export type FromServer = Message<keyof Schemas>;
export type LogprobColumns = Shape<typeof logprobColumns>;
export type FinishReason = ReturnType<typeof finishReason>;
/** Tokens of a request; `cached` is the part of the prompt that the prefix cache held. */
export type Usage = Shape<typeof usage>;
