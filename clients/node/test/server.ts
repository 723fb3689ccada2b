/** A server that a test plays: it says what it is told to say. */

import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Decoder } from '@msgpack/msgpack';
import { curveKeyPair, Router } from 'zeromq';
import { encode } from '../dist/codec.js';
import type { FromClient } from '../dist/messages.js';

export type Reply = (message: FromClient) => void;
export type Handler = (message: Record<string, any>, reply: Reply, peer: string) => void;

const decoder = new Decoder({ useBigInt64: true });

export const WELCOME: FromClient = {
  t: 'welcome', version: 1, role: 'gateway', server: 'test', model: 'm', vocab_size: 9, max_model_len: 99,
  max_streams: 9, max_message_bytes: 2 ** 20, heartbeat_ms: 50, heartbeat_timeout_ms: 1000,
};

export class TestServer {
  readonly url: string;
  readonly keys = curveKeyPair();
  readonly seen: Record<string, any>[] = [];
  /** The answers to hellos, the last of them to all that follow; undefined: none. */
  greetings: (FromClient | undefined)[] = [WELCOME];
  readonly #folder = mkdtempSync(join(tmpdir(), 'pw-'));
  readonly #path: string;
  readonly #handler: Handler;
  readonly #hasKeys: boolean;
  #socket: Router | undefined;

  constructor(handler: Handler, hasKeys = false) {
    this.#path = join(this.#folder, 's');
    this.url = `ipc://${this.#path}`;
    this.#handler = handler;
    this.#hasKeys = hasKeys;
  }

  async open(): Promise<this> {
    const socket = new Router({ mandatory: true, linger: 0 });
    if (this.#hasKeys) Object.assign(socket, { curveServer: true, curveSecretKey: this.keys.secretKey });
    await socket.bind(this.url);
    this.#socket = socket;
    void this.#run(socket);
    return this;
  }

  /** Cut every connection, and be gone. */
  shut(): void {
    this.#socket?.close();
  }

  close(): void {
    this.shut();
    rmSync(this.#folder, { recursive: true, force: true });
  }

  async #run(socket: Router): Promise<void> {
    let sending = Promise.resolve();
    for await (const [peer, frame] of socket) {
      const message = decoder.decode(frame!.subarray(1)) as Record<string, any>;
      if (message['t'] !== 'ping') this.seen.push(message);
      const send = (bytes: Uint8Array) => {
        sending = sending.then(() => socket.send([peer!, bytes])).catch(() => undefined);
      };
      if (message['t'] === 'ping') send(encode({ t: 'pong' }));
      if (message['t'] === 'hello') {
        const greeting = this.greetings.length > 1 ? this.greetings.shift() : this.greetings[0];
        if (greeting !== undefined) send(encode(greeting));
      }
      this.#handler(message, (reply) => send(reply['raw'] instanceof Uint8Array ? reply['raw'] : encode(reply)), peer!.toString('hex'));
    }
  }
}

export function packed(kind: 'u32' | 'u16' | 'f32', ...values: number[]): Uint8Array {
  const arrays = { u32: Uint32Array, u16: Uint16Array, f32: Float32Array };
  return new Uint8Array(arrays[kind].from(values).buffer);
}

/** Tokens of one stream, with the words as their text. */
export function tokens(stream: number, start: number, words: string[], choice = 0): FromClient {
  return {
    t: 'tokens', streams: packed('u32', stream), starts: packed('u32', start), choices: packed('u16', choice),
    ids: packed('u32', ...words.map((_, i) => 100 + start + i)), counts: packed('u16', words.length), texts: [words.join('')],
  };
}

export function accepted(stream: number, key = ''): FromClient {
  return {
    t: 'accepted', stream, request_id: 'r1', seed: 2n ** 63n - 1n, num_prompt_tokens: 3, max_tokens: 9, resume_key: key,
  };
}

export function finished(stream: number, numTokens: number, more: object = {}): FromClient {
  return { t: 'finished', stream, reason: 'length', num_tokens: numTokens, ...more };
}

export function done(stream: number, completion: number): FromClient {
  const timings = { queue_ns: 1, first_token_ns: 2_000_000, total_ns: 60_000_000_000 };
  return { t: 'done', stream, seed: 2n ** 63n - 1n, usage: { prompt: 3, completion }, timings };
}
