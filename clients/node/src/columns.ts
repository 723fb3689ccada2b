/** Packed columns: runs of tokens with what belongs to them. Numbers are little-endian. */

import { InvalidRequest, ProtocolError } from './errors.js';
import type { LogprobColumns, Message } from './messages.js';
import type { TokenLogprob } from './result.js';

/** One entry of a `tokens` message. */
export interface Run {
  stream: number;
  choice: number;
  start: number;
  ids: number[];
  text: string;
  logprobs: TokenLogprob[] | undefined;
}

/**
 * Token ids as a `prompt_ids` field.
 *
 * @throws InvalidRequest one of them is no unsigned 32-bit integer.
 */
export function packIds(ids: Iterable<number>, field: string): Uint8Array {
  const values = Array.isArray(ids) || ids instanceof Uint32Array ? ids : [...ids];
  const packed = new DataView(new ArrayBuffer(4 * values.length));
  values.forEach((id: number, index: number) => {
    if (!Number.isInteger(id) || id < 0 || id > 0xffffffff) {
      throw new InvalidRequest(`token ${index} is ${String(id)}, no token id`, { field });
    }
    packed.setUint32(4 * index, id, true);
  });
  return new Uint8Array(packed.buffer);
}

/**
 * The entries of a message, in order.
 *
 * @throws ProtocolError the columns do not fit together.
 */
export function runs(message: Message<'tokens'>): Run[] {
  const streams = unpack('Uint32', message.streams);
  const starts = unpack('Uint32', message.starts);
  const ids = unpack('Uint32', message.ids);
  const num = streams.length;
  const counts = message.counts.length ? unpack('Uint16', message.counts) : new Array<number>(num).fill(1);
  const choices = message.choices.length ? unpack('Uint16', message.choices) : new Array<number>(num).fill(0);
  const texts = message.texts.length ? message.texts : new Array<string>(num).fill('');
  const total = counts.reduce((sum, count) => sum + count, 0);
  if ([starts, counts, choices, texts].some((column) => column.length !== num) || total !== ids.length) {
    throw new ProtocolError('the columns of a tokens message differ in length');
  }
  const logprobs = message.logprobs && logprobsByEntry(message.logprobs, counts);
  let at = 0;
  return streams.map((stream, entry) => ({
    stream,
    choice: choices[entry]!,
    start: starts[entry]!,
    ids: ids.slice(at, (at += counts[entry]!)),
    text: texts[entry]!,
    logprobs: logprobs?.get(entry),
  }));
}

function logprobsByEntry(columns: LogprobColumns, counts: number[]): Map<number, TokenLogprob[]> {
  const entries = unpack('Uint32', columns.entries);
  if (entries.length !== columns.top.length || entries.some((entry) => entry >= counts.length)) {
    throw new ProtocolError('the columns of log-probabilities differ in length');
  }
  const found = new Map<number, TokenLogprob[]>();
  let [at, atTop] = [0, 0];
  entries.forEach((entry, index) => {
    const [num, top] = [counts[entry]!, columns.top[index]!];
    const [end, endTop] = [at + 4 * num, atTop + 4 * num * top];
    found.set(
      entry,
      tokenLogprobs(
        columns.chosen.subarray(at, end), columns.top_ids.subarray(atTop, endTop),
        columns.top_logprobs.subarray(atTop, endTop), num, top,
      ),
    );
    [at, atTop] = [end, endTop];
  });
  return found;
}

/**
 * Log-probabilities of `num` tokens with `top` alternatives each.
 *
 * @throws ProtocolError the columns are of other lengths.
 */
export function tokenLogprobs(
  chosen: Uint8Array, topIds: Uint8Array, topLogprobs: Uint8Array, num: number, top: number,
): TokenLogprob[] {
  if (chosen.length !== 4 * num || topIds.length !== 4 * num * top || topLogprobs.length !== topIds.length) {
    throw new ProtocolError('the columns of log-probabilities differ in length');
  }
  const [ids, others] = [unpack('Uint32', topIds), unpack('Float32', topLogprobs)];
  return unpack('Float32', chosen).map((logprob, i) => ({
    logprob,
    top: ids.slice(i * top, (i + 1) * top).map((tokenId, j) => ({ tokenId, logprob: others[i * top + j]! })),
  }));
}

function unpack(kind: 'Uint16' | 'Uint32' | 'Float32', column: Uint8Array): number[] {
  const size = kind === 'Uint16' ? 2 : 4;
  if (column.length % size) throw new ProtocolError(`a column of ${column.length} bytes, of ${size} each`);
  const view = new DataView(column.buffer, column.byteOffset, column.byteLength);
  const values = new Array<number>(column.length / size);
  for (let i = 0; i < values.length; i++) values[i] = view[`get${kind}`](i * size, true);
  return values;
}
