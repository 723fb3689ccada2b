/** One connection to a server: a DEALER and what libzmq says of it. A new one is made for each new connection. */

import { Context, Dealer } from 'zeromq';
import { MAX_REPLY_BYTES } from './codec.js';
import { ConfigError } from './errors.js';
import type { CurveKeys } from './keys.js';

/** Of all clients of this process. Where it ends, it waits for no message that nobody takes. */
const context = new Context({ blocky: false });

export interface ConnectionEvents {
  onConnected(): void;
  /** Closed before there was a connection; `why`, should it be meant so. */
  onFailed(why: string): void;
  onFrame(frame: Uint8Array): void;
  /** What arrived before was handed to `onFrame`. */
  onBroken(): void;
  /** The server refused our keys, or that we have none. */
  onDenied(why: string): void;
}

/**
 * One socket, and what waits to be sent over it; all of it does until there is a connection: inside the socket it would be
 * lost with it.
 */
export class Connection {
  numUnsentBytes = 0;
  readonly #socket: Dealer;
  readonly #events: ConnectionEvents;
  readonly #unsent: Uint8Array[] = [];
  #sending: Promise<void> | undefined;
  #isConnected = false;
  #numFrames = 0;

  constructor(url: string, curve: CurveKeys | undefined, retries: [number, number], events: ConnectionEvents) {
    this.#events = events;
    this.#socket = new Dealer({
      context,
      ipv6: url.includes('['), // where it is set, an IPv4 address works, too, but a name may become either
      reconnectInterval: retries[0],
      reconnectMaxInterval: retries[1],
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
    const why = hasKeys ? "the server's key is another one, or it has none" : 'the server asks for keys (curve)';
    const { events } = this.#socket;
    events.on('handshake', () => {
      this.#isConnected = true;
      this.#events.onConnected();
      this.#sending ??= this.#drain();
    });
    events.on('disconnect', () => {
      const wasConnected = this.#isConnected;
      this.#isConnected = false;
      if (wasConnected) void this.#broken();
      else this.#events.onFailed(why);
    });
    events.on('handshake:error:auth', () => this.#events.onDenied("our key is not on the server's list"));
    events.on('handshake:error:protocol', () => this.#events.onDenied(why));
    // 'handshake:error:other', without a detail, is followed by 'disconnect'.
  }

  send(frame: Uint8Array): void {
    this.#unsent.push(frame);
    this.numUnsentBytes += frame.length;
    if (this.#isConnected) this.#sending ??= this.#drain();
  }

  /** What was not sent, which it forgets. */
  takeUnsent(): Uint8Array[] {
    this.numUnsentBytes = 0;
    return this.#unsent.splice(0);
  }

  forgetFirst(): void {
    this.numUnsentBytes -= this.#unsent.shift()?.length ?? 0;
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
    this.#isConnected = false;
    if (!this.#socket.closed) this.#socket.close();
  }

  /** The library takes one `send` at a time, and its promise waits until the server's queue has room. */
  async #drain(): Promise<void> {
    try {
      while (this.#isConnected && this.#unsent.length > 0) {
        const frame = this.#unsent.shift()!;
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
