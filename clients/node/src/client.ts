/** The client: one connection to a server, any number of streams over it. */

import { createHash } from 'node:crypto';
import { packIds, runs, tokenLogprobs } from './columns.js';
import { ConnectionLost, fromCode, InvalidRequest, PagewireError, ProtocolError } from './errors.js';
import { loadKeys } from './keys.js';
import type { CurveOption } from './keys.js';
import { Link } from './link.js';
import { MAX_STREAM } from './messages.js';
import type { FromClient, FromServer, Message } from './messages.js';
import { callersName, chatFields, optionFields, promptFields } from './request.js';
import type { ChatMessage, ChatOptions, GenerateOptions } from './request.js';
import { findUrl, isRefused } from './servers.js';
import { StreamState } from './state.js';
import type { Ticket } from './state.js';
import { Stream } from './stream.js';
import type { StreamOwner } from './stream.js';

export interface ConnectOptions {
  /** How long to wait for the server's welcome. Default: 10 s where a server is, no time where an ipc socket is dead. */
  timeoutMs?: number;
  /** Free text for the server's logs. */
  name?: string;
  /** For a server that asks for keys: its public key, and our own ones, or the file of `pagewire keys curve new`. */
  curve?: CurveOption;
  /** How long open streams wait for a connection that broke; 0: they end with it. Default: 30 s. */
  resumeTimeoutMs?: number;
}

/** How busy a server is, for whoever spreads requests over several. */
export interface Load {
  ready: boolean;
  running: number;
  waiting: number;
  kvBlocks: number;
  kvBlocksUsed: number;
}

type Answer = Message<'stats' | 'load' | 'file_piece'>;
interface Asked {
  t: Answer['t'];
  resolve(answer: Answer): void;
  reject(error: PagewireError): void;
}

/** What the server says of itself and of its limits. */
export type ServerInfo = Readonly<Omit<Message<'welcome'>, 't'>>;

const WELCOME_MS = 10_000;
const RESUME_MS = 30_000;
const ANSWER_MS = 5000;
/** Of a message around its prompt. */
const OVERHEAD_BYTES = 4096;

/**
 * Connect to a gateway or an engine; without a URL to the newest server that this user runs on this machine.
 *
 * @throws ConnectionLost nobody answers there in time.
 * @throws ConfigError the URL is no endpoint, or the keys are none.
 * @throws PagewireError the server lets nobody in now.
 */
export async function connect(url?: string, options: ConnectOptions = {}): Promise<Client> {
  const found = url ?? (await findUrl());
  if (options.timeoutMs === undefined && (await isRefused(found))) {
    throw new ConnectionLost(`no server answers at ${found}: is it running?`);
  }
  const client = new Client(found, options);
  try {
    await client.waitReady(options.timeoutMs ?? WELCOME_MS);
  } catch (error) {
    await client.close();
    throw error;
  }
  return client;
}

/** Stays connected until `close`: when the connection breaks, a new one is made and open streams go on over it. */
export class Client implements AsyncDisposable {
  readonly #link: Link;
  readonly #streams = new Map<number, StreamState>();
  readonly #owner: StreamOwner;
  readonly #resumeTimeoutMs: number;
  readonly #asked: Asked[] = [];
  #next = 1;
  #info: Message<'welcome'> | undefined;
  #sweeper: NodeJS.Timeout | undefined;

  /** See `connect`, which also waits for the welcome. */
  constructor(url: string, options: ConnectOptions = {}) {
    this.#resumeTimeoutMs = options.resumeTimeoutMs ?? RESUME_MS;
    this.#owner = {
      cancel: (state) => this.#cancel(state),
      finish: (state, at, choice) => this.#finish(state, at, choice),
      pause: (state, paused) => this.#tellOf(state, { t: 'pause', stream: state.number, paused }),
    };
    this.#link = new Link(url, options.name ?? 'pagewire-node', options.curve && loadKeys(options.curve), {
      onMessage: (message) => this.#onMessage(message),
      onLost: (error) => this.#onLost(error),
      onWelcome: (welcome) => this.#onWelcome(welcome),
    });
  }

  get url(): string {
    return this.#link.url;
  }

  /** Who serves what, under which limits; of the latest connection. */
  get info(): ServerInfo {
    if (this.#info === undefined) throw new ConnectionLost(`no server has answered at ${this.url} yet`);
    return this.#info;
  }

  /** New streams would be taken, as far as is known; `unready` says why not. */
  get isReady(): boolean {
    return this.#link.isReady;
  }

  get unready(): string {
    return this.#link.unready;
  }

  /** Open streams, those included that were cancelled and wait for the server's last word. */
  get numStreams(): number {
    return this.#streams.size;
  }

  /** Wait for the server's welcome; throws as `connect`. */
  async waitReady(timeoutMs: number): Promise<ServerInfo> {
    return this.#link.waitWelcome(timeoutMs);
  }

  /**
   * Start a stream; the request is sent at once.
   *
   * @param prompt text (to a gateway), or token ids, which are taken as they are.
   * @throws InvalidRequest a bad argument; `field` names it. What the server refuses comes out of the stream.
   * @throws ConnectionLost it cannot be sent.
   */
  generate(prompt: string | Iterable<number>, options: GenerateOptions = {}): Stream {
    return this.#start(promptFields(prompt), options);
  }

  /** Start a stream that answers a conversation (gateway only); throws as `generate`. */
  chat(messages: readonly ChatMessage[], options: ChatOptions = {}): Stream {
    return this.#start(chatFields(messages), options);
  }

  /**
   * Go on with a stream that another process began, or that this one lost: with the tokens that `ticket.received` leaves.
   * Its result has those tokens only. Throws as `generate`; a stream that is not kept any more fails with `UnknownStream`.
   */
  resume(ticket: Ticket): Stream {
    const state = new StreamState(this.#takeNumber(), [...ticket.received], false, ticket);
    this.#link.send(resumeMessage(state.number, ticket));
    this.#streams.set(state.number, state);
    return new Stream(state, this.#owner);
  }

  /**
   * Counters and gauges of the server.
   *
   * @throws ConnectionLost it did not answer in time.
   */
  async stats(timeoutMs = ANSWER_MS): Promise<Record<string, number>> {
    return (await this.#ask('stats', { t: 'get_stats' }, timeoutMs)).values;
  }

  /** How busy the server is; throws as `stats`. */
  async load(timeoutMs = ANSWER_MS): Promise<Load> {
    const load = await this.#ask('load', { t: 'get_load' }, timeoutMs);
    const { ready, running, waiting, kv_blocks: kvBlocks, kv_blocks_used: kvBlocksUsed } = load;
    return { ready, running, waiting, kvBlocks, kvBlocksUsed };
  }

  /**
   * One of the files that `info.files` lists: the tokenizer's, for those who make text of token ids themselves.
   *
   * @throws InvalidRequest there is no such file.
   * @throws ConnectionLost the server did not answer in time.
   * @throws ProtocolError what came is not the file.
   */
  async file(name: string, timeoutMs = ANSWER_MS): Promise<Uint8Array> {
    const listed = this.info.files.find((file) => file.name === name);
    if (listed === undefined) throw new InvalidRequest(`the server has no file ${name}`, { field: 'name' });
    const pieces: Uint8Array[] = [];
    for (let offset = 0; offset < listed.size; offset += pieces.at(-1)!.length) {
      const { data } = await this.#ask('file_piece', { t: 'get_file', name, offset }, timeoutMs);
      if (data.length === 0) break;
      pieces.push(data);
    }
    const whole = Buffer.concat(pieces);
    if (createHash('sha256').update(whole).digest('hex') !== listed.sha256) {
      throw new ProtocolError(`${name} is not as the server lists it`);
    }
    return whole;
  }

  async #ask<T extends Answer['t']>(t: T, message: FromClient, timeoutMs: number): Promise<Message<T>> {
    this.#link.send(message);
    let timer: NodeJS.Timeout | undefined;
    try {
      return await new Promise<Message<T>>((resolve, reject) => {
        this.#asked.push({ t, resolve: resolve as Asked['resolve'], reject });
        timer = setTimeout(() => reject(new ConnectionLost(`no answer from ${this.url} after ${timeoutMs} ms`)), timeoutMs);
      });
    } finally {
      clearTimeout(timer);
    }
  }

  /**
   * Leave: the server cancels what is open. Idempotent.
   *
   * @param options `keepStreams`: they go on for the server's grace time, for whoever resumes them by their tickets.
   */
  async close(options: { keepStreams?: boolean } = {}): Promise<void> {
    clearInterval(this.#sweeper);
    this.#fail(() => true, new ConnectionLost('the client was closed'));
    await this.#link.close(!options.keepStreams);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  #start(source: Record<string, unknown>, options: ChatOptions): Stream {
    const fields = optionFields(options);
    this.#checkSize(source);
    const state = new StreamState(
      this.#takeNumber(), new Array<number>(Math.max(1, options.n ?? 1)).fill(0), options.logprobs !== undefined,
    );
    options.signal?.throwIfAborted();
    this.#link.send({ t: 'generate', stream: state.number, ...source, ...fields });
    this.#streams.set(state.number, state);
    options.signal?.addEventListener('abort', () => this.#cancel(state), { once: true });
    return new Stream(state, this.#owner);
  }

  /** The server would cut the connection over a message beyond its limit, and all its streams with it. */
  #checkSize(source: Record<string, unknown>): void {
    const limit = this.#info?.max_message_bytes ?? Infinity;
    const [field, value] = Object.entries(source)[0]!;
    const size = value instanceof Uint8Array ? value.length : Buffer.byteLength(JSON.stringify(value));
    if (size + OVERHEAD_BYTES > limit) {
      throw new InvalidRequest(`has ${size} bytes; the server takes messages of ${limit}`, { field: callersName(field) });
    }
  }

  #takeNumber(): number {
    while (this.#streams.has(this.#next)) this.#next = (this.#next % MAX_STREAM) + 1;
    const number = this.#next;
    this.#next = (this.#next % MAX_STREAM) + 1;
    return number;
  }

  #cancel(state: StreamState): void {
    if (state.isCancelled || state.isOver) return;
    state.isCancelled = true;
    this.#tellOf(state, { t: 'cancel', stream: state.number });
  }

  #finish(state: StreamState, at: number, choice: number): void {
    state.endAt(choice, at);
    this.#tellOf(state, { t: 'finish', stream: state.number, choice, at });
  }

  #tellOf(state: StreamState, message: FromClient): void {
    if (state.isOver || state.isResuming) return; // it follows the resume
    try {
      this.#link.send(message);
    } catch (error) {
      this.#drop(state, error as PagewireError);
    }
  }

  #drop(state: StreamState, error: PagewireError): void {
    this.#streams.delete(state.number);
    state.fail(error);
  }

  #fail(which: (state: StreamState) => boolean, error: PagewireError): void {
    for (const state of [...this.#streams.values()]) if (which(state)) this.#drop(state, error);
    for (const asked of this.#asked.splice(0)) asked.reject(error);
  }

  // ---- from the server ----------------------------------------------------------------------------------------------

  #onMessage(message: FromServer): void {
    switch (message.t) {
      case 'tokens':
        return this.#onTokens(message);
      case 'error':
        return this.#onError(message);
      case 'stats':
      case 'load':
      case 'file_piece': {
        const index = this.#asked.findIndex((asked) => asked.t === message.t); // they are answered in order
        if (index >= 0) this.#asked.splice(index, 1)[0]!.resolve(message);
        return;
      }
      case 'accepted':
      case 'prompt_logprobs':
      case 'finished':
      case 'done': {
        const state = this.#streams.get(message.stream);
        if (state !== undefined) this.#guarded(state, () => this.#tell(state, message));
      }
    }
  }

  #tell(state: StreamState, message: Message<'accepted' | 'prompt_logprobs' | 'finished' | 'done'>): void {
    if (message.t === 'accepted') {
      state.accepted = message;
      state.isResuming = false;
      state.resumeBy = Infinity;
    } else if (message.t === 'prompt_logprobs') {
      const { chosen, top_ids: ids, top_logprobs: logprobs, top } = message;
      state.promptLogprobs = tokenLogprobs(chosen, ids, logprobs, chosen.length / 4, top);
    } else if (message.t === 'finished') {
      state.finish(message);
    } else {
      state.end(message);
      this.#streams.delete(state.number);
    }
  }

  #onTokens(message: Message<'tokens'>): void {
    try {
      for (const run of runs(message)) {
        const state = this.#streams.get(run.stream);
        if (state !== undefined) this.#guarded(state, () => state.add(run));
      }
    } catch (error) {
      // Whose tokens these were is not known.
      for (const state of [...this.#streams.values()]) this.#distrust(state, error as PagewireError);
    }
  }

  #guarded(state: StreamState, take: () => void): void {
    try {
      take();
    } catch (error) {
      if (!(error instanceof ProtocolError)) throw error;
      this.#distrust(state, error);
    }
  }

  /** Its tokens are not complete: better an error than a wrong text. */
  #distrust(state: StreamState, error: PagewireError): void {
    this.#cancel(state);
    this.#drop(state, error);
  }

  #onError(message: Message<'error'>): void {
    if (message.stream === null) return; // a cancel that crossed its stream's end
    const state = this.#streams.get(message.stream);
    if (state === undefined) return;
    const retryAfterMs = message.retry_after_ms ?? undefined;
    if (state.isResuming && retryAfterMs !== undefined && performance.now() + retryAfterMs < state.resumeBy) {
      const { welcome } = this.#link; // over another connection it is asked for anyway
      setTimeout(() => this.#link.welcome === welcome && this.#resume(state), retryAfterMs).unref();
      return;
    }
    const field = message.field === null ? undefined : callersName(message.field);
    const error = fromCode(message.code, message.message, {
      field, retryAfterMs, predictedTtftMs: message.predicted_ttft_ms ?? undefined,
    });
    const isForgotten = state.isResuming && error instanceof InvalidRequest;
    this.#drop(state, isForgotten ? new ConnectionLost(`the connection broke, and the stream is gone: ${message.message}`) : error);
  }

  // ---- connections --------------------------------------------------------------------------------------------------

  #onLost(error: PagewireError): void {
    const wait = this.#resumeTimeoutMs;
    this.#fail((state) => wait === 0 || !state.suspend(wait), error);
    this.#sweeper ??= setInterval(() => this.#sweep(), 250);
  }

  /** Streams that have waited too long for a connection end. */
  #sweep(): void {
    const now = performance.now();
    this.#fail((state) => state.resumeBy < now, new ConnectionLost(`the connection to ${this.url} broke and did not come back`));
    if (![...this.#streams.values()].some((state) => state.isResuming)) {
      clearInterval(this.#sweeper);
      this.#sweeper = undefined;
    }
  }

  #onWelcome(welcome: Message<'welcome'>): void {
    this.#info = welcome;
    for (const state of this.#streams.values()) if (state.isResuming) this.#resume(state);
  }

  #resume(state: StreamState): void {
    if (!state.isResuming || state.isOver || this.#link.welcome === undefined || state.ticket === undefined) return;
    try {
      this.#link.send(resumeMessage(state.number, state.ticket));
      if (state.isCancelled) this.#link.send({ t: 'cancel', stream: state.number });
      for (const [choice, at] of state.unansweredEnds) this.#link.send({ t: 'finish', stream: state.number, choice, at });
    } catch (error) {
      this.#drop(state, error as PagewireError);
    }
  }
}

function resumeMessage(stream: number, ticket: Ticket): FromClient {
  const received = packIds(ticket.received, 'received');
  return { t: 'resume', stream, request_id: ticket.requestId, resume_key: ticket.resumeKey, received };
}
