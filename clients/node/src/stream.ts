/** The handle of a running request. */

import { fromCode } from './errors.js';
import type { PagewireError } from './errors.js';
import type { Chunk, Result } from './result.js';
import type { StreamState, Ticket } from './state.js';

/** What a handle asks of its client. */
export interface StreamOwner {
  cancel(state: StreamState): void;
  finish(state: StreamState, at: number, choice: number): void;
  pause(state: StreamState, isPaused: boolean): void;
}

/**
 * Chunks by `for await`, the whole by `await stream.result()`; both may be used.
 *
 * Leaving the loop early (`break`, `return`, an exception) cancels the request on the server. A stream that is never
 * iterated runs to its end. What is not read is kept: at most `maxTokens` tokens a choice.
 */
export class Stream implements AsyncIterable<Chunk>, AsyncDisposable {
  readonly #state: StreamState;
  readonly #owner: StreamOwner;

  /** Made by `Client.generate`, `chat` and `resume`. */
  constructor(state: StreamState, owner: StreamOwner) {
    this.#state = state;
    this.#owner = owner;
  }

  /** The server's name for it; undefined until it was accepted. */
  get requestId(): string | undefined {
    return this.#state.accepted?.request_id;
  }

  /** The seed in use; undefined until it was accepted. */
  get seed(): bigint | undefined {
    return this.#state.accepted?.seed;
  }

  /**
   * How to go on with it from another process, with the chunks that were read so far left out: see `Client.resume`. Plain JSON,
   * and a secret. Undefined until it was accepted, and where it cannot be resumed.
   */
  get ticket(): Ticket | undefined {
    return this.#state.userTicket;
  }

  /** @throws PagewireError the request was refused or failed, after all chunks that came before. */
  async *[Symbol.asyncIterator](): AsyncGenerator<Chunk, void, undefined> {
    const state = this.#state;
    try {
      for (;;) {
        const chunk = state.take();
        if (chunk !== undefined) yield chunk;
        else if (state.error !== undefined && !state.isAbandoned) throw again(state.error);
        else if (state.isOver || state.isAbandoned) return;
        else await state.changed();
      }
    } finally {
      this.#abandon();
    }
  }

  /**
   * Wait for the end. A stream that was cancelled has a result, too: what came, with that finish reason.
   *
   * @throws PagewireError the request was refused or failed.
   */
  async result(): Promise<Result> {
    const state = this.#state;
    while (!state.isOver) await state.changed();
    if (state.error !== undefined) throw again(state.error);
    return state.result();
  }

  /** Ask the server to end it. What comes until then can be read. Idempotent. */
  cancel(): void {
    this.#owner.cancel(this.#state);
  }

  /** End a choice as stopped after its first `at` tokens; for those who look for stops in the text themselves. */
  finish(at: number, choice = 0): void {
    this.#owner.finish(this.#state, at, choice);
  }

  /** Let the server generate nothing more for now; `pause(false)` goes on. */
  pause(isPaused = true): void {
    this.#owner.pause(this.#state, isPaused);
  }

  /** `await using stream = …` cancels at the end of the block. */
  async [Symbol.asyncDispose](): Promise<void> {
    this.#abandon();
  }

  #abandon(): void {
    if (this.#state.isOver) return;
    this.#state.isAbandoned = true;
    this.#state.chunks.length = 0;
    this.#owner.cancel(this.#state);
    this.#state.wake();
  }
}

/** A new one to throw, whose stack shows who waits. */
function again(error: PagewireError): PagewireError {
  const { field, retryAfterMs, predictedTtftMs } = error;
  return fromCode(error.code, error.reason, { field, retryAfterMs, predictedTtftMs });
}
