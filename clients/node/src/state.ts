/** What the client keeps of a stream: fed by the client, read by the user's handle. */

import type { Run } from './columns.js';
import { ConnectionLost, PagewireError, ProtocolError } from './errors.js';
import type { FinishReason, Message } from './messages.js';
import type { ChoiceResult, Chunk, Result, TokenLogprob } from './result.js';

/** What it takes to go on with a stream from another process; plain JSON. The key is a secret. */
export interface Ticket {
  requestId: string;
  resumeKey: string;
  /** How many tokens of each choice are there already. */
  received: number[];
}

interface ChoiceState {
  /** Tokens that were there before, where the stream was resumed from a ticket. */
  readonly base: number;
  /** Tokens that the user has: those, and what was read since. */
  read: number;
  tokenIds: number[];
  texts: string[];
  logprobs: TokenLogprob[];
  gaps: number[];
  heardAt: number;
  finishReason: FinishReason | undefined;
  stop: string | number | undefined;
}

/** Bounded: at most `maxTokens` tokens a choice, read or not. */
export class StreamState {
  accepted: Message<'accepted'> | undefined;
  error: PagewireError | undefined;
  promptLogprobs: TokenLogprob[] | undefined;
  /** Its connection broke, and it was not accepted on a new one yet. */
  isResuming = false;
  /** When a resume is given up, by `performance.now()`. */
  resumeBy = Infinity;
  isCancelled = false;
  /** Nobody reads chunks any more. */
  isAbandoned = false;
  readonly chunks: Chunk[] = [];

  readonly number: number;
  readonly #ticket: Ticket | undefined;
  readonly #choices: ChoiceState[];
  /** Where the user ended choices, by choice. */
  readonly #ends = new Map<number, number>();
  readonly #startedAt = performance.now();
  #hasLogprobs: boolean;
  #firstAt = 0;
  #overAt = 0;
  #done: Message<'done'> | undefined;
  #waiters: (() => void)[] = [];

  /** @param received for each choice how many tokens are there already: zeros for a new stream. */
  constructor(number: number, received: number[], hasLogprobs: boolean, ticket?: Ticket) {
    this.number = number;
    this.#hasLogprobs = hasLogprobs;
    this.#ticket = ticket;
    this.#choices = received.map((base) => ({
      base, read: base, tokenIds: [], texts: [], logprobs: [], gaps: [], heardAt: 0, finishReason: undefined, stop: undefined,
    }));
  }

  get isOver(): boolean {
    return this.#done !== undefined || this.error !== undefined;
  }

  /** The user ends a choice after `at` tokens; the server may not hear of it. */
  endAt(choice: number, at: number): void {
    if (choice < this.#choices.length) this.#ends.set(choice, at); // else it is refused
  }

  /** Choices that the user ended and the server has not, with where: they are told again over a new connection. */
  get unansweredEnds(): [number, number][] {
    return [...this.#ends].filter(([choice]) => this.#choices[choice]?.finishReason === undefined);
  }

  /** How the user goes on with it: what was not read yet comes again. Undefined where that is not possible (yet). */
  get userTicket(): Ticket | undefined {
    const ticket = this.ticket;
    return ticket && { ...ticket, received: this.#choices.map((choice) => choice.read) };
  }

  /** How the client goes on with it; undefined where that is not possible (yet). */
  get ticket(): Ticket | undefined {
    const { requestId, resumeKey } = this.accepted
      ? { requestId: this.accepted.request_id, resumeKey: this.accepted.resume_key }
      : (this.#ticket ?? { requestId: '', resumeKey: '' });
    if (resumeKey === '') return undefined;
    return { requestId, resumeKey, received: this.#choices.map((choice) => choice.base + choice.tokenIds.length) };
  }

  // ---- from the server ----------------------------------------------------------------------------------------------

  add(run: Run): void {
    const choice = this.#choice(run.choice);
    const known = choice.base + choice.tokenIds.length;
    if (run.start !== known) throw new ProtocolError(`tokens from ${run.start} follow ${known} tokens`);
    if (run.ids.length > 0) {
      const now = performance.now();
      this.#firstAt ||= now;
      if (choice.heardAt > 0) choice.gaps.push(now - choice.heardAt);
      for (let i = 1; i < run.ids.length; i++) choice.gaps.push(0);
      choice.heardAt = now;
      choice.tokenIds.push(...run.ids);
    }
    if (run.logprobs !== undefined) {
      this.#hasLogprobs = true;
      choice.logprobs.push(...run.logprobs);
    }
    if (run.text) choice.texts.push(run.text);
    this.#give({ text: run.text, tokenIds: run.ids, index: run.start, choice: run.choice, logprobs: run.logprobs });
  }

  finish(message: Message<'finished'>): void {
    const choice = this.#choice(message.choice);
    if (choice.finishReason !== undefined) return; // told again, after a resume
    const keep = message.num_tokens - choice.base;
    if (keep > choice.tokenIds.length) {
      throw new ProtocolError(`${message.num_tokens} tokens at the end, ${choice.base + choice.tokenIds.length} came`);
    }
    // Cut by `finish`: what came after the cut does not count.
    choice.tokenIds.length = Math.max(keep, 0);
    choice.logprobs.length = Math.min(choice.logprobs.length, choice.tokenIds.length);
    choice.finishReason = message.reason;
    choice.stop = message.stop ?? undefined;
    if (message.text) {
      choice.texts.push(message.text);
      const [index, number] = [message.num_tokens, message.choice];
      this.#give({ text: message.text, tokenIds: [], index, choice: number, logprobs: undefined });
    }
  }

  end(message: Message<'done'>): void {
    if (this.#choices.some((choice) => choice.finishReason === undefined)) {
      throw new ProtocolError('a stream ended before its choices');
    }
    this.#done = message;
    this.#overAt = performance.now();
    this.wake();
  }

  /** It is over, with an error. What came before can still be read. Idempotent. */
  fail(error: PagewireError): void {
    if (this.isOver) return;
    this.error = error;
    this.wake();
  }

  /** Its connection broke. Whether it can go on over another one. */
  suspend(resumeTimeoutMs: number): boolean {
    if (this.ticket === undefined) return false;
    if (!this.isResuming) this.resumeBy = performance.now() + resumeTimeoutMs;
    this.isResuming = true;
    return true;
  }

  #choice(number: number): ChoiceState {
    const choice = this.#choices[number];
    if (choice === undefined) throw new ProtocolError(`choice ${number}, of ${this.#choices.length}`);
    return choice;
  }

  #give(chunk: Chunk): void {
    if (this.isAbandoned) return;
    this.chunks.push(chunk);
    this.wake();
  }

  // ---- for the handle -----------------------------------------------------------------------------------------------

  /** The next chunk, if there is one. */
  take(): Chunk | undefined {
    const chunk = this.chunks.shift();
    if (chunk !== undefined) this.#choices[chunk.choice]!.read = chunk.index + chunk.tokenIds.length;
    return chunk;
  }

  changed(): Promise<void> {
    return new Promise((resolve) => this.#waiters.push(resolve));
  }

  wake(): void {
    const waiters = this.#waiters;
    this.#waiters = [];
    for (const waiter of waiters) waiter();
  }

  /** Only after `end`. */
  result(): Result {
    const done = this.#done;
    if (done === undefined) throw new ConnectionLost('the stream is not over');
    const gaps = this.#choices.flatMap((choice) => choice.gaps).sort((a, b) => a - b);
    const choices = this.#choices.map((choice) => this.#choiceResult(choice));
    return {
      ...choices[0]!,
      requestId: this.ticket?.requestId ?? this.accepted?.request_id ?? '',
      choices,
      usage: done.usage,
      seed: done.seed,
      timings: {
        ttftMs: this.#firstAt > 0 ? this.#firstAt - this.#startedAt : undefined,
        itlP50Ms: percentile(gaps, 0.5),
        itlP95Ms: percentile(gaps, 0.95),
        itlP99Ms: percentile(gaps, 0.99),
        totalMs: this.#overAt - this.#startedAt,
        server: {
          queueMs: done.timings.queue_ns / 1e6,
          firstTokenMs: done.timings.first_token_ns / 1e6,
          totalMs: done.timings.total_ns / 1e6,
          numPreemptions: done.timings.num_preemptions,
        },
      },
      promptLogprobs: this.promptLogprobs,
    };
  }

  #choiceResult(choice: ChoiceState): ChoiceResult {
    return {
      text: choice.texts.join(''),
      tokenIds: choice.tokenIds,
      finishReason: choice.finishReason!,
      stop: choice.stop,
      logprobs: this.#hasLogprobs ? choice.logprobs : undefined,
    };
  }
}

/** The smallest of the sorted values that `share` of them do not exceed. */
function percentile(sorted: number[], share: number): number | undefined {
  return sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)];
}
