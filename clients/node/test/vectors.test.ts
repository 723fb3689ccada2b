/** Frames against the golden vectors. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Decoder } from '@msgpack/msgpack';
import { decode, encode } from '../dist/codec.js';
import { runs } from '../dist/columns.js';
import { PagewireError } from '../dist/errors.js';
import type { FromClient } from '../dist/messages.js';
import { chatFields, optionFields, promptFields } from '../dist/request.js';
import { comparable, plain, vectors } from './json.js';

const decoder = new Decoder({ useBigInt64: true });
const frameOf = (hex: string) => new Uint8Array(Buffer.from(hex, 'hex'));
const meaning = (frame: Uint8Array) => comparable(decoder.decode(frame.subarray(1)));

test('what a client sends', () => {
  for (const { name, frame, message, full } of vectors('client.json')) {
    const encoded = encode(plain(message) as FromClient);
    assert.equal(encoded[0], 1, name);
    assert.deepEqual(meaning(encoded), meaning(frameOf(frame)), name);
    assert.deepEqual(meaning(encode(plain(full) as FromClient)), comparable(plain(full)), name);
  }
});

test('requests as this client makes them', () => {
  const byName = new Map(vectors('client.json').map((vector) => [vector.name, vector]));
  const made = {
    'generate, text': {
      ...promptFields('Once upon a time, in Zürich 🏔'), ...optionFields({ maxTokens: 64 }), stream: 2,
    },
    'generate, messages': {
      ...chatFields([{ role: 'system', content: 'Be brief.' }, { role: 'user', content: 'Why?' }]),
      template_kwargs: { thinking: false, date: '2026-01-31', depth: 3, share: 0.5, tools: null }, stream: 3,
    },
    'generate, all parameters': {
      ...promptFields([5]),
      ...optionFields({
        maxTokens: 2 ** 31 - 1, minTokens: 3, temperature: 0.7, topK: 40, topP: 0.95, minP: 0.05,
        repetitionPenalty: 1.1, presencePenalty: -0.5, frequencyPenalty: 0.25, logitBias: { 7: -100, 128_000: 1.5 },
        seed: 2n ** 63n - 1n, n: 2, logprobs: 5, promptLogprobs: 0, stop: ['\n\n', '###'], stopTokenIds: [2, 3],
        ignoreEos: true, priority: -100, namespace: 'tenant-a', echoText: false,
      }),
      stream: 4_294_967_295,
    },
  };
  for (const [name, fields] of Object.entries(made)) {
    const { frame } = byName.get(name)!;
    assert.deepEqual(meaning(encode({ t: 'generate', ...fields })), meaning(frameOf(frame)), name);
  }
});

test('what a server sends', () => {
  const known = [...vectors('server.json'), ...vectors('tolerated.json').filter(({ from }) => from === 'server')];
  for (const { name, frame, full, runs: expected } of known) {
    const message = decode(frameOf(frame));
    // All that we know stands there; there may be more: a server may say what this client has no use for.
    const ours = comparable(message) as object;
    const theirs = comparable(plain(full)) as object;
    assert.deepEqual({ ...theirs, ...ours }, theirs, name);
    if (message.t !== 'tokens') continue;
    const entries = runs(message).map(({ logprobs, text, ...rest }) => ({
      ...rest,
      text: message.texts.length > 0 ? text : null,
      logprobs: logprobs?.map(({ logprob, top }) => ({ chosen: logprob, top: top.map((t) => [t.tokenId, t.logprob]) })) ?? null,
    }));
    assert.deepEqual(entries, expected, name);
  }
});

test('what is no message', () => {
  for (const { name, frame, code } of vectors('refused.json').filter(({ from }) => from === 'server')) {
    assert.throws(() => decode(frameOf(frame)), (error) => error instanceof PagewireError && error.code === code, name);
  }
});
