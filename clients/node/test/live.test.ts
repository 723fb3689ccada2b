/** The client against a real server with the demo model: `PAGEWIRE_URL=ipc://… npm test`. */

import assert from 'node:assert/strict';
import { connect as dial, createServer } from 'node:net';
import type { AddressInfo, Socket } from 'node:net';
import { test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { curveKeyPair } from 'zeromq';
import { connect, InvalidRequest, PagewireError, Unauthorized, UnknownStream } from '../dist/index.js';

const url = process.env['PAGEWIRE_URL'] ?? '';
const live = { skip: url === '' && 'PAGEWIRE_URL names no server' };
const ask = [{ role: 'user', content: 'What is the capital of France?' }];

test('chat, text, token ids', live, async () => {
  await using client = await connect(url);
  assert.equal(client.info.role, 'gateway');
  const stream = client.chat(ask, { temperature: 0, maxTokens: 8 });
  let text = '';
  for await (const chunk of stream) text += chunk.text;
  const result = await stream.result();
  assert.match(text, /Paris/);
  assert.equal(result.text, text);
  assert.equal(result.usage.completion, result.tokenIds.length);
  assert.ok(result.usage.prompt > 0 && result.timings.totalMs > 0 && result.timings.server.totalMs > 0);

  const options = { maxTokens: 4, seed: 7, ignoreEos: true };
  const [once, again] = [client.generate('Once upon a time', options), client.generate('Once upon a time', options)];
  assert.deepEqual((await once.result()).tokenIds, (await again.result()).tokenIds);
  const byIds = await client.generate(Uint32Array.of(1, 2, 3), { ...options, n: 2, logprobs: 2, promptLogprobs: 0 }).result();
  assert.deepEqual(byIds.choices.map((choice) => [choice.tokenIds.length, choice.finishReason]), [[4, 'length'], [4, 'length']]);
  assert.deepEqual([byIds.seed, byIds.promptLogprobs!.length, byIds.choices[1]!.logprobs!.length], [7n, 2, 4]);
  for (const { logprob, top } of byIds.logprobs!) assert.ok(top.length === 2 && logprob <= top[0]!.logprob + 1e-5);
});

test('several streams over one connection; leaving early frees the server', live, async () => {
  await using client = await connect(url);
  const streams = Array.from({ length: 8 }, (_, i) => client.generate([1, 2, 3 + i], { maxTokens: 3, ignoreEos: true }));
  for (const result of await Promise.all(streams.map((stream) => stream.result()))) assert.equal(result.tokenIds.length, 3);
  const long = client.generate('Count to a thousand:', { maxTokens: 1000, ignoreEos: true });
  for await (const chunk of long) if (chunk.index > 2) break;
  assert.equal((await long.result()).finishReason, 'cancelled');
  for (let i = 0; (await client.stats())['sequences_running'] !== 0 && i < 100; i++) await sleep(50);
  const load = await client.load();
  assert.deepEqual([load.ready, load.running, load.waiting], [true, 0, 0]);
});

test('what is refused', live, async () => {
  await using client = await connect(url);
  await assert.rejects(client.generate('x', { temperature: -1 }).result(), (error) => {
    return error instanceof InvalidRequest && error.code === 'invalid_request' && error.field === 'temperature';
  });
  await assert.rejects(client.generate('x', { maxTokens: 2 ** 40 }).result(), (error) => (error as PagewireError).field === 'maxTokens');
});

test("the tokenizer's files", live, async () => {
  await using client = await connect(url);
  for (const { name, size } of client.info.files) assert.equal((await client.file(name)).length, size);
});

test('streams go on after their connection was cut', live, async () => {
  const sockets = new Set<Socket>();
  const proxy = createServer((near) => {
    const far = dial(url.replace('ipc://', ''));
    near.pipe(far).pipe(near);
    for (const socket of [near, far]) {
      sockets.add(socket);
      socket.on('error', () => undefined);
      socket.on('close', () => (near.destroy(), far.destroy()));
    }
  });
  await new Promise<void>((resolve) => proxy.listen(0, '127.0.0.1', resolve));
  const client = await connect(`tcp://127.0.0.1:${(proxy.address() as AddressInfo).port}`);
  try {
    const options = { maxTokens: 12, seed: 3, ignoreEos: true };
    const whole = await client.generate('The sea', options).result();
    const stream = client.generate('The sea', options);
    let [text, cuts] = ['', 0];
    for await (const chunk of stream) {
      text += chunk.text;
      if (cuts < 2 && chunk.index >= 3 * (cuts + 1)) {
        assert.ok(stream.ticket, 'the server resumes nothing');
        cuts++;
        for (const socket of sockets) socket.destroy();
      }
    }
    assert.equal(cuts, 2);
    assert.deepEqual([text, (await stream.result()).tokenIds], [whole.text, whole.tokenIds]);

    const left = client.generate('The sea', options);
    text = '';
    for await (const chunk of left) {
      text += chunk.text;
      if (chunk.index < 3) continue;
      const ticket = left.ticket!;
      await client.close({ keepStreams: true });
      await using other = await connect(url);
      const rest = await other.resume(ticket).result();
      assert.deepEqual(rest.tokenIds, whole.tokenIds.slice(ticket.received[0]));
      assert.equal(text + rest.text, whole.text);
      await assert.rejects(other.resume({ ...ticket, resumeKey: '00' }).result(), UnknownStream);
      break;
    }
  } finally {
    await client.close();
    for (const socket of sockets) socket.destroy();
    proxy.close();
  }
});

const keyed = process.env['PAGEWIRE_CURVE_URL'] ?? '';
test('a server with keys', { skip: keyed === '' && 'PAGEWIRE_CURVE_URL names no server' }, async () => {
  const { PAGEWIRE_SERVER_KEY: serverKey = '', PAGEWIRE_KEY_FILE: keyFile = '' } = process.env;
  await using client = await connect(keyed, { curve: { serverKey, keyFile } });
  const result = await client.generate([5, 6, 7], { maxTokens: 3, ignoreEos: true }).result();
  assert.equal(result.tokenIds.length, 3);
  await assert.rejects(connect(keyed), Unauthorized);
  const { publicKey, secretKey } = curveKeyPair();
  await assert.rejects(connect(keyed, { curve: { serverKey, publicKey, secretKey } }), Unauthorized);
});
