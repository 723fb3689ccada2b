/** What a stream gives: chunks while it runs, a result when it is over. */

import type { FinishReason, Usage } from './messages.js';

export type { FinishReason, Usage };

/** Of one token: its log-probability, and the most likely tokens in its place. */
export interface TokenLogprob {
  logprob: number;
  top: { tokenId: number; logprob: number }[];
}

/**
 * What became known at once of one choice.
 *
 * Text and token ids may each be empty: a character can take several tokens, and what was held back because it could have
 * become a stop string comes at the end. The texts of all chunks of a choice, joined, are its text.
 */
export interface Chunk {
  text: string;
  tokenIds: number[];
  /** Of the first of `tokenIds` among the generated tokens. */
  index: number;
  choice: number;
  /** One a token, if they were asked for. */
  logprobs: TokenLogprob[] | undefined;
}

/** One finished continuation. */
export interface ChoiceResult {
  /** Empty from an engine, which knows token ids only. */
  text: string;
  tokenIds: number[];
  finishReason: FinishReason;
  /** The stop string or the stop token's id that ended it. */
  stop: string | number | undefined;
  logprobs: TokenLogprob[] | undefined;
}

/** Measured by the engine, in milliseconds since the request arrived there. */
export interface ServerTimings {
  queueMs: number;
  firstTokenMs: number;
  totalMs: number;
  numPreemptions: number;
}

/** Milliseconds. Gaps are those between tokens seen here; tokens that came in one message are 0 apart. */
export interface Timings {
  /** From `generate` to the first token here; undefined if there was none. */
  ttftMs: number | undefined;
  itlP50Ms: number | undefined;
  itlP95Ms: number | undefined;
  itlP99Ms: number | undefined;
  /** From `generate` to the end. */
  totalMs: number;
  /** Measured by the engine. */
  server: ServerTimings;
}

/** A finished stream. The fields of the first choice are the result's own; `choices` has all of them. */
export interface Result extends ChoiceResult {
  requestId: string;
  choices: ChoiceResult[];
  usage: Usage;
  /** With this seed the same request gives the same tokens. */
  seed: bigint;
  timings: Timings;
  /** Of the prompt's tokens but the first, if they were asked for. */
  promptLogprobs: TokenLogprob[] | undefined;
}
