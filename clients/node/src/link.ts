/**
 * A link to one server: one connection at a time, watched, and replaced when it breaks.
 *
 *     pause ──▶ new socket ── hello ──▶ waiting ── welcome ──▶ welcomed ── ping … pong
 *       ▲           │ not connected         │                       │
 *       ├───────────┘                       │                       │
 *       └────────────── `onLost` ───────────┴───────────────────────┘
 *                        disconnected, silent for the heartbeat timeout, or not known to the server any more
 *
 * Each connection has a socket of its own, so that nothing of an old one reaches the streams of a new one. What is sent
 * before the welcome follows the hello, in order. A hello is said again only after the one before was refused: each starts the
 * connection anew, and what was asked between two is lost.
 */

import { Backoff } from './backoff.js';
import { decode, encode } from './codec.js';
import { Connection } from './connection.js';
import { ConnectionLost, fromCode, Overloaded, PagewireError, Unauthorized } from './errors.js';
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

const HEARTBEAT_MS = 1000;
const HEARTBEAT_TIMEOUT_MS = 10_000;
/** A connection that the server kept for so long was good. */
const STEADY_MS = 1000;
/** Handshakes of a server that never let us in that fail without a reason in a row, after which that is a refusal. */
const MAX_FAILURES = 4;
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
  readonly #backoff = new Backoff();
  #connection: Connection;
  #pause: NodeJS.Timeout | undefined;
  #numFailed = 0;
  #wasWelcomed = false;
  #welcomedAt = 0;
  /** A hello is under way that was not answered. */
  #isGreeting = false;
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
    this.#backoff.next(); // the first attempt
    this.#connection = this.#connect([]);
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
    clearTimeout(this.#pause);
    this.#tellWaiters((waiter) => waiter.reject(new ConnectionLost('the client was closed')));
    if (this.welcome !== undefined && goodbye) this.#connection.send(encode({ t: 'goodbye' }));
    await this.#connection.close(this.welcome !== undefined);
  }

  /** @param waiting frames that follow the hello. */
  #connect(waiting: Uint8Array[]): Connection {
    this.#heardAt = performance.now();
    const connection = new Connection(this.url, this.#curve, this.#backoff.ownRetries(), {
      onConnected: () => this.#isCurrent(connection) && this.#onConnected(),
      onFailed: (why) => this.#isCurrent(connection) && this.#onFailed(why),
      onFrame: (frame) => this.#isCurrent(connection) && this.#onFrame(frame),
      onBroken: () => this.#isCurrent(connection) && this.#lost(new ConnectionLost(`the connection to ${this.url} broke`)),
      onDenied: (why) => this.#isCurrent(connection) && this.#onDenied(why),
    });
    connection.send(encode(this.#hello));
    this.#isGreeting = true;
    for (const frame of waiting) connection.send(frame);
    return connection;
  }

  /** Make another connection, after a pause where there were attempts in vain. What waits in this one waits for that. */
  #connectLater(): void {
    this.#connection.abandon();
    const pause = this.#backoff.next();
    const now = () => {
      this.#pause = undefined;
      this.#connection = this.#connect(this.#connection.takeUnsent());
    };
    if (pause > 0) this.#pause = setTimeout(now, pause);
    else now();
  }

  #onConnected(): void {
    this.#numFailed = 0;
    this.#heardAt = performance.now();
  }

  /** Somebody took the connection and closed it before a word: a server that starts or ends, or a proxy with none behind it. */
  #onFailed(why: string): void {
    if (++this.#numFailed >= MAX_FAILURES && !this.#wasWelcomed) return this.#onDenied(why);
    this.#connection.forgetFirst(); // the hello
    this.#connectLater();
  }

  #isCurrent(connection: Connection): boolean {
    return this.#isOpen && connection === this.#connection;
  }

  /** Give the connection up and make another. */
  #lost(error: PagewireError): void {
    if (this.welcome !== undefined && performance.now() - this.#welcomedAt >= STEADY_MS) this.#backoff.reset();
    this.#connection.abandon();
    this.#connection.takeUnsent();
    this.welcome = undefined;
    this.isReady = false;
    this.#refusal = undefined;
    this.#connectLater();
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
    if (this.welcome !== undefined) {
      this.#lost(new ConnectionLost(`the server at ${this.url} began this connection anew`));
      return;
    }
    this.welcome = welcome;
    [this.#wasWelcomed, this.#welcomedAt, this.#isGreeting] = [true, performance.now(), false];
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
    this.#isGreeting = false;
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
    this.#connection.takeUnsent();
    this.#numFailed = 0;
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
    if (this.#connection.isClosed) {
      if (this.#pause === undefined) this.#connection = this.#connect(this.#connection.takeUnsent()); // denied
    } else if (!isLate && now - this.#heardAt > this.#timeoutMs) {
      this.#lost(new ConnectionLost(`the server at ${this.url} was silent for ${this.#timeoutMs} ms`));
    } else if (this.welcome !== undefined) {
      if (this.#connection.numUnsentBytes === 0) this.#connection.send(encode({ t: 'ping' }));
    } else if (this.#refusal !== undefined && !this.#isGreeting) {
      this.#connection.send(encode(this.#hello));
      this.#isGreeting = true;
    }
  }
}
