/**
 * Frames: one version byte, then one message as a MessagePack map.
 *
 *     byte 0        1 …
 *     ├─ version ─┼─ {"t": "generate", "stream": 7, …} ──┤
 */

import { Decoder, Encoder } from '@msgpack/msgpack';
import { ProtocolError, VersionMismatch } from './errors.js';
import { PROTOCOL_VERSION, SCHEMAS, struct } from './messages.js';
import type { FromClient, FromServer, Schema } from './messages.js';

/** What a client takes. The largest reply is `prompt_logprobs`: 4 + 8 × top bytes a token of the prompt. */
export const MAX_REPLY_BYTES = 64 * 2 ** 20;

const encoder = new Encoder({ useBigInt64: true, ignoreUndefined: true });
const decoder = new Decoder({ useBigInt64: true });

/** The frame of a message. */
export function encode(message: FromClient): Uint8Array {
  const parts: Uint8Array[] = [Uint8Array.of(PROTOCOL_VERSION)];
  pack(message, parts);
  return Buffer.concat(parts);
}

/** Maps are written here, since the library's have keys of text only, and `logit_bias` has integers. */
function pack(value: unknown, parts: Uint8Array[]): void {
  const isPlain = typeof value === 'object' && value !== null && Object.getPrototypeOf(value) === Object.prototype;
  if (!isPlain && !(value instanceof Map)) {
    parts.push(encoder.encode(value));
    return;
  }
  const pairs: [unknown, unknown][] = value instanceof Map ? [...value] : Object.entries(value as object);
  const set = pairs.filter(([, item]) => item !== undefined);
  if (set.length < 16) parts.push(Uint8Array.of(0x80 | set.length));
  else parts.push(Uint8Array.of(0xde, set.length >> 8, set.length & 0xff));
  for (const [key, item] of set) {
    parts.push(encoder.encode(key));
    pack(item, parts);
  }
}

/**
 * What a server sent. Fields that this client does not know are skipped: a newer server may say more.
 *
 * @throws VersionMismatch the frame is of another protocol version.
 * @throws ProtocolError too long, or no message of this protocol.
 */
export function decode(frame: Uint8Array): FromServer {
  if (frame.length > MAX_REPLY_BYTES) {
    throw new ProtocolError(`a message of ${frame.length} bytes; at most ${MAX_REPLY_BYTES} are taken`);
  }
  if (frame.length === 0) throw new ProtocolError('an empty frame');
  if (frame[0] !== PROTOCOL_VERSION) {
    throw new VersionMismatch(`a frame of protocol version ${frame[0]}; spoken here: ${PROTOCOL_VERSION}`);
  }
  let body: unknown;
  try {
    body = decoder.decode(frame.subarray(1));
  } catch (error) {
    throw new ProtocolError(`not a message: ${(error as Error).message}`);
  }
  const { t } = struct({ t: (value) => value })(body);
  const schema = typeof t === 'string' && Object.hasOwn(SCHEMAS, t) ? SCHEMAS[t as keyof typeof SCHEMAS] : undefined;
  if (schema === undefined) throw new ProtocolError(`no message of this protocol: ${String(t)}`, { field: 't' });
  return { t, ...struct<Schema>(schema)(body) } as FromServer;
}
