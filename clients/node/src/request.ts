/** What callers give, as the fields of a `generate` message. A complaint names the option as the caller wrote it. */

import { packIds } from './columns.js';
import { InvalidRequest } from './errors.js';

/** A turn of a conversation. */
export interface ChatMessage {
  role: string;
  content: string;
}

/** How tokens are chosen and when a continuation ends. The server checks ranges and refuses by name. */
export interface SamplingOptions {
  /** As many as fit, by default. */
  maxTokens?: number;
  minTokens?: number;
  /** 0 is greedy. */
  temperature?: number;
  topK?: number;
  topP?: number;
  minP?: number;
  repetitionPenalty?: number;
  presencePenalty?: number;
  frequencyPenalty?: number;
  /** By token id. */
  logitBias?: Record<number, number> | ReadonlyMap<number, number>;
  /** Drawn by the server, by default; the result tells it. */
  seed?: number | bigint;
  /** Continuations; chunks of all of them come as they are made. */
  n?: number;
  /** 0: of the chosen token; k: also of the k most likely. */
  logprobs?: number;
  promptLogprobs?: number;
  stop?: string | readonly string[];
  stopTokenIds?: readonly number[];
  ignoreEos?: boolean;
}

export interface GenerateOptions extends SamplingOptions {
  /** Higher runs first: -100 to 100. */
  priority?: number;
  /**
   * Wanted time to the first token, between tokens, and to the end, in ms. What cannot be kept is refused at once with
   * `Overloaded`; beyond `deadlineMs` the stream ends with `DeadlineExceeded`.
   */
  ttftMs?: number;
  itlMs?: number;
  deadlineMs?: number;
  /** Prefix cache entries are shared inside a namespace only. */
  namespace?: string;
  /** False: token ids only, no text. */
  echoText?: boolean;
  /** When the client reads too slowly: it gets tokens later, none are made until it caught up, or the stream ends. */
  onLag?: 'coalesce' | 'pause' | 'cancel';
  /** False: the stream ends with its connection. */
  resumable?: boolean;
  /** Aborting it cancels the stream. */
  signal?: AbortSignal;
}

export interface ChatOptions extends GenerateOptions {
  /** For the model's chat template. */
  templateKwargs?: Record<string, string | number | boolean | null>;
}

const SAMPLING = [
  'maxTokens', 'minTokens', 'temperature', 'topK', 'topP', 'minP', 'repetitionPenalty', 'presencePenalty',
  'frequencyPenalty', 'logitBias', 'seed', 'n', 'logprobs', 'promptLogprobs', 'stop', 'stopTokenIds', 'ignoreEos',
];
const OTHERS = [
  'priority', 'namespace', 'echoText', 'onLag', 'resumable', 'templateKwargs', 'ttftMs', 'itlMs', 'deadlineMs',
];

/**
 * The fields of a prompt: text or token ids.
 *
 * @throws InvalidRequest it is neither.
 */
export function promptFields(prompt: string | Iterable<number>): Record<string, unknown> {
  if (typeof prompt === 'string') return { prompt: wellFormed(prompt, 'prompt') };
  if (typeof prompt !== 'object' || prompt === null || !(Symbol.iterator in prompt)) {
    throw new InvalidRequest(`must be text or token ids, not ${typeof prompt}`, { field: 'prompt' });
  }
  return { prompt_ids: packIds(prompt, 'prompt') };
}

/**
 * The fields of a conversation.
 *
 * @throws InvalidRequest it is no list of turns.
 */
export function chatFields(messages: readonly ChatMessage[]): Record<string, unknown> {
  if (!Array.isArray(messages)) throw new InvalidRequest('must be an array of { role, content }', { field: 'messages' });
  messages.forEach((turn: unknown, index) => {
    const { role, content } = (turn ?? {}) as Partial<ChatMessage>;
    if (typeof role !== 'string' || typeof content !== 'string') {
      throw new InvalidRequest('must be { role, content }, both text', { field: `messages[${index}]` });
    }
    wellFormed(content, `messages[${index}].content`);
  });
  return { messages };
}

/**
 * The other fields of a request.
 *
 * @throws InvalidRequest an unknown option.
 */
export function optionFields(options: ChatOptions): Record<string, unknown> {
  const params: Record<string, unknown> = {};
  const fields: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || name === 'signal') continue;
    if (SAMPLING.includes(name)) params[snake(name)] = onWire(name, value);
    else if (OTHERS.includes(name)) fields[snake(name)] = value;
    else throw new InvalidRequest('is unknown', { field: name });
  }
  return { params, ...fields };
}

function onWire(name: string, value: unknown): unknown {
  if (Number.isNaN(value)) throw new InvalidRequest('is NaN; give a number', { field: name });
  if (name === 'stop') {
    const stops = typeof value === 'string' ? [value] : [...(value as Iterable<string>)];
    return stops.map((stop, index) => (typeof stop === 'string' ? wellFormed(stop, `stop[${index}]`) : stop));
  }
  if (name === 'logitBias') {
    const pairs = value instanceof Map ? [...value] : Object.entries(value as object);
    return new Map(pairs.map(([id, bias]) => [Number(id), bias]));
  }
  return value;
}

function wellFormed(text: string, field: string): string {
  if (!text.isWellFormed()) throw new InvalidRequest('must be text without lone surrogates', { field });
  return text;
}

function snake(name: string): string {
  return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}

/** A field of an error as the caller wrote it: `params.max_tokens` is `maxTokens`. */
export function callersName(field: string): string {
  return field.replace(/^params\./, '').replace(/^prompt_ids/, 'prompt').replace(/_([a-z])/g, (_, letter) => letter.toUpperCase());
}
