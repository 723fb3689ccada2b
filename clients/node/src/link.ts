/**
 * A link to one server: one connection at a time, watched, and replaced when it breaks.
 *
 *     new socket ── hello ──▶ waiting ── welcome ──▶ welcomed ── ping … pong
 *         ▲                      │                       │
 *         └────── `onLost` ──────┴───────────────────────┘
 *                  disconnected, silent for the heartbeat timeout, or not known to the server any more
 *
 * Each connection has a socket of its own, so that nothing of an old one reaches the streams of a new one. What is sent
 * before the welcome follows the hello, in order.
 */

import { Context, Dealer } from 'zeromq';
import { decode, encode, MAX_REPLY_BYTES } from './codec.js';
import { ConfigError, ConnectionLost, fromCode, Overloaded, PagewireError, Unauthorized } from './errors.js';
import type { CurveKeys } from './keys.js';
import { PROTOCOL_VERSION } from './messages.js';
import type { FromClient, FromServer, Message } from './messages.js';

export interface LinkEvents {
  /** Every message but `welcome` and `pong`. */
  onMessage(message: FromServer): void;
  /** A connection broke: nothing more comes for what was asked over it. A new one is being made. */
  onLost(error: PagewireError): void;
  /** A connection was let in: the first, and each that was made after one broke. */
  onWelcome(welcome: Message<'welcome'>): void;
}

/** Of all clients of this process. Where it ends, it waits for no message that nobody takes. */
const context = new Context({ blocky: false });

const HEARTBEAT_MS = 1000;
const HEARTBEAT_TIMEOUT_MS = 10_000;
const RECONNECT_MS = 50;
/** Handshakes that fail without a reason in a row, after which it is taken for a refusal. */
const MAX_FAILURES = 5;
/** What waits for a server that takes nothing; beyond it `send` refuses. */
const MAX_UNSENT_BYTES = 64 * 2 ** 20;
/** `field` of the error by which a server tells that it does not know the connection (any more). */
const HELLO_FIRST = 'hello';

interface Waiter {
  resolve(welcome: Message<'welcome'>): void;
  reject(error: PagewireError): void;
}

export class Link {
  welcome: Message<'welcome'> | undefined;
  /** What the server's last pong said. */
  isReady = false;
  unready = '';

  readonly url: string;
  readonly #hello: FromClient;
  readonly #curve: CurveKeys | undefined;
  readonly #events: LinkEvents;
  #connection: Connection;
  #refusal: PagewireError | undefined;
  #waiters: Waiter[] = [];
  #heartbeatMs = HEARTBEAT_MS;
  #timeoutMs = HEARTBEAT_TIMEOUT_MS;
  #heardAt = 0;
  #tickedAt = 0;
  #ticker: NodeJS.Timeout;
  #isOpen = true;

  constructor(url: string, name: string, curve: CurveKeys | undefined, events: LinkEvents) {
    this.url = url;
    this.#hello = { t: 'hello', versions: [PROTOCOL_VERSION], client: name };
    this.#curve = curve;
    this.#events = events;
    this.#connection = this.#connect();
    this.#ticker = this.#startTicking();
  }

  /**
   * Wait until the server let us in.
   *
   * @throws ConnectionLost nobody answered in time.
   * @throws PagewireError the server refused, as its error says.
   */
  waitWelcome(timeoutMs: number): Promise<Message<'welcome'>> {
    if (this.welcome !== undefined) return Promise.resolve(this.welcome);
    if (this.#refusal !== undefined) return Promise.reject(this.#refusal);
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => {
        this.#waiters = this.#waiters.filter((other) => other !== waiter);
        reject(new ConnectionLost(`no server answers at ${this.url} after ${timeoutMs} ms: is it running?`));
      }, timeoutMs);
      const waiter = {
        resolve: (welcome: Message<'welcome'>) => (clearTimeout(timer), resolve(welcome)),
        reject: (error: PagewireError) => (clearTimeout(timer), reject(error)),
      };
      this.#waiters.push(waiter);
    });
  }

  /**
   * Send, in the order of the calls; what the server does not take now waits.
   *
   * @throws ConnectionLost the link is closed.
   * @throws Overloaded too much waits already.
   * @throws PagewireError the server refused to let us in.
   */
  send(message: FromClient): void {
    if (!this.#isOpen) throw new ConnectionLost('the client was closed');
    if (this.#refusal !== undefined) throw this.#refusal;
    const frame = encode(message);
    if (this.#connection.numUnsentBytes + frame.length > MAX_UNSENT_BYTES) {
      throw new Overloaded('the server takes no messages now', { retryAfterMs: this.#timeoutMs });
    }
    this.#connection.send(frame);
  }

  /** Say goodbye (unless told not to) and free the socket. Idempotent. */
  async close(goodbye = true): Promise<void> {
    if (!this.#isOpen) return;
    this.#isOpen = false;
    clearInterval(this.#ticker);
    this.#tellWaiters((waiter) => waiter.reject(new ConnectionLost('the client was closed')));
    if (this.welcome !== undefined && goodbye) this.#connection.send(encode({ t: 'goodbye' }));
    await this.#connection.close(this.welcome !== undefined);
  }

  #connect(): Connection {
    this.#heardAt = performance.now();
    const connection = new Connection(this.url, this.#curve, {
      onFrame: (frame) => this.#isCurrent(connection) && this.#onFrame(frame),
      onBroken: () => this.#isCurrent(connection) && this.#lost(new ConnectionLost(`the connection to ${this.url} broke`)),
      onDenied: (why) => this.#isCurrent(connection) && this.#onDenied(why),
    });
    connection.send(encode(this.#hello));
    return connection;
  }

  #isCurrent(connection: Connection): boolean {
    return this.#isOpen && connection === this.#connection;
  }

  /** Give the connection up and make another. */
  #lost(error: PagewireError): void {
    this.#connection.abandon();
    this.welcome = undefined;
    this.isReady = false;
    this.#refusal = undefined;
    this.#connection = this.#connect();
    this.#events.onLost(error);
  }

  #onFrame(frame: Uint8Array): void {
    this.#heardAt = performance.now();
    let message: FromServer;
    try {
      message = decode(frame);
    } catch (error) {
      // What it said is unknown: tokens may be among it. No stream of this connection can be trusted any more.
      this.#lost(new ConnectionLost(`the server sent what is no message: ${(error as Error).message}`));
      return;
    }
    if (message.t === 'pong') {
      [this.isReady, this.unready] = [message.ready, message.reason];
    } else if (message.t === 'welcome') {
      this.#onWelcome(message);
    } else if (message.t === 'error' && (this.welcome === undefined || message.field === HELLO_FIRST)) {
      this.#onRefusal(message);
    } else {
      this.#events.onMessage(message);
    }
  }

  #onWelcome(welcome: Message<'welcome'>): void {
    this.welcome = welcome;
    [this.isReady, this.unready] = [true, ''];
    this.#refusal = undefined;
    [this.#heartbeatMs, this.#timeoutMs] = [welcome.heartbeat_ms, welcome.heartbeat_timeout_ms];
    clearInterval(this.#ticker);
    this.#ticker = this.#startTicking();
    this.#tellWaiters((waiter) => waiter.resolve(welcome));
    this.#events.onWelcome(welcome);
  }

  #onRefusal(message: Message<'error'>): void {
    if (message.field === HELLO_FIRST) {
      if (this.welcome !== undefined) {
        this.#lost(new ConnectionLost(`the server at ${this.url} was restarted or gave this connection up`));
      } else if (message.stream !== null) {
        // It followed a hello that was refused, and fares as that did.
        const { code, reason } = this.#refusal ?? new ConnectionLost('the server did not know this connection yet');
        this.#events.onMessage({ ...message, code, message: reason, field: null });
      }
      return;
    }
    this.#refuse(
      fromCode(message.code, message.message, {
        field: message.field ?? undefined,
        retryAfterMs: message.retry_after_ms ?? undefined,
      }),
    );
  }

  /** The server does not let us connect; it is tried again with the next heartbeat. */
  #onDenied(why: string): void {
    this.#connection.abandon();
    const denied = new Unauthorized(`the server at ${this.url} lets us not in: ${why}`);
    this.#refuse(denied);
    this.#events.onLost(denied); // what was sent behind the hello will never be answered
  }

  #refuse(error: PagewireError): void {
    this.#refusal = error;
    this.#tellWaiters((waiter) => waiter.reject(error));
  }

  #tellWaiters(tell: (waiter: Waiter) => void): void {
    const waiters = this.#waiters;
    this.#waiters = [];
    waiters.forEach(tell);
  }

  #startTicking(): NodeJS.Timeout {
    this.#tickedAt = performance.now();
    return setInterval(() => this.#tick(), this.#heartbeatMs);
  }

  /** Say that we live; find out whether the server does. */
  #tick(): void {
    const now = performance.now();
    // After a tick that comes late (this process was busy or stopped) nobody is judged: the server's words may wait.
    const isLate = now - this.#tickedAt > 2 * this.#heartbeatMs;
    this.#tickedAt = now;
    if (!isLate && now - this.#heardAt > this.#timeoutMs) {
      this.#lost(new ConnectionLost(`the server at ${this.url} was silent for ${this.#timeoutMs} ms`));
    } else if (this.welcome !== undefined) {
      if (this.#connection.numUnsentBytes === 0) this.#connection.send(encode({ t: 'ping' }));
    } else if (this.#connection.isClosed) {
      this.#connection = this.#connect();
    } else if (this.#refusal !== undefined && this.#connection.numUnsentBytes === 0) {
      this.#connection.send(encode(this.#hello));
    }
  }
}

interface ConnectionEvents {
  onFrame(frame: Uint8Array): void;
  /** What arrived before was handed to `onFrame`. */
  onBroken(): void;
  /** The server refused our keys, or that we have none. */
  onDenied(why: string): void;
}

/** One socket, and what waits to be sent over it. */
class Connection {
  numUnsentBytes = 0;
  readonly #socket: Dealer;
  readonly #events: ConnectionEvents;
  readonly #unsent: Uint8Array[] = [];
  #sending: Promise<void> | undefined;
  #numFrames = 0;

  constructor(url: string, curve: CurveKeys | undefined, events: ConnectionEvents) {
    this.#events = events;
    this.#socket = new Dealer({
      context,
      ipv6: url.includes('['), // where it is set, an IPv4 address works, too, but a name may become either
      reconnectInterval: RECONNECT_MS,
      maxMessageSize: 2 * MAX_REPLY_BYTES,
      linger: 0,
    });
    this.#watch(curve !== undefined);
    let field = 'curve';
    try {
      if (curve !== undefined) {
        this.#socket.curveServerKey = curve.serverKey;
        this.#socket.curvePublicKey = curve.publicKey;
        this.#socket.curveSecretKey = curve.secretKey;
      }
      field = 'url';
      this.#socket.connect(url);
    } catch (error) {
      this.abandon(); // one that is left open would keep the process from ending
      throw new ConfigError(`${field === 'url' ? url : 'the keys'}: ${(error as Error).message}`, { field });
    }
    void this.#receive();
  }

  get isClosed(): boolean {
    return this.#socket.closed;
  }

  #watch(hasKeys: boolean): void {
    let [isConnected, numFailed] = [false, 0];
    const why = hasKeys ? "the server's key is another one, or it has none" : 'the server asks for keys (curve)';
    const { events } = this.#socket;
    events.on('handshake', () => ([isConnected, numFailed] = [true, 0]));
    events.on('disconnect', () => {
      if (isConnected) void this.#broken();
      isConnected = false;
    });
    events.on('handshake:error:auth', () => this.#events.onDenied("our key is not on the server's list"));
    events.on('handshake:error:protocol', () => this.#events.onDenied(why));
    // Without a detail it may be a server that is just starting or ending: libzmq tries again by itself.
    events.on('handshake:error:other', () => {
      if (++numFailed >= MAX_FAILURES) this.#events.onDenied(why);
    });
  }

  send(frame: Uint8Array): void {
    this.#unsent.push(frame);
    this.numUnsentBytes += frame.length;
    this.#sending ??= this.#drain();
  }

  /** Close once all was sent (if `flush`), half a second later at most. */
  async close(flush: boolean): Promise<void> {
    if (flush) {
      await Promise.race([this.#sending, new Promise((resolve) => setTimeout(resolve, 500).unref())]);
      this.#socket.linger = 500;
    }
    this.abandon();
  }

  /** Close at once. Idempotent. */
  abandon(): void {
    this.#unsent.length = 0;
    if (!this.#socket.closed) this.#socket.close();
  }

  /** The library takes one `send` at a time, and its promise waits until the server's queue has room. */
  async #drain(): Promise<void> {
    try {
      for (let frame = this.#unsent.shift(); frame !== undefined; frame = this.#unsent.shift()) {
        await this.#socket.send(frame);
        this.numUnsentBytes -= frame.length;
      }
    } catch {
      // The socket was closed: whoever closed it knows.
    }
    this.#sending = undefined;
  }

  async #receive(): Promise<void> {
    try {
      for await (const parts of this.#socket) {
        this.#numFrames++;
        this.#events.onFrame(parts.length === 1 ? parts[0]! : new Uint8Array(0));
      }
    } catch {
      // The socket was closed.
    }
  }

  async #broken(): Promise<void> {
    let seen: number;
    do {
      seen = this.#numFrames;
      for (let turn = 0; turn < 4; turn++) await new Promise((resolve) => setImmediate(resolve));
    } while (seen !== this.#numFrames);
    this.#events.onBroken();
  }
}
