/** The client against a server that the test plays. */

import assert from 'node:assert/strict';
import { afterEach, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { curveKeyPair } from 'zeromq';
import {
  Client, connect, ConfigError, ConnectionLost, InvalidRequest, Overloaded, PagewireError, Unauthorized,
} from '../dist/index.js';
import type { ConnectOptions } from '../dist/index.js';
import { accepted, done, finished, packed, TestServer, tokens } from './server.js';
import type { Handler } from './server.js';

const open: { close(): unknown }[] = [];
afterEach(async () => {
  for (const thing of open.splice(0).reverse()) await thing.close();
});

async function serve(handler: Handler, hasKeys = false): Promise<TestServer> {
  const server = await new TestServer(handler, hasKeys).open();
  open.push(server);
  return server;
}

async function connected(server: TestServer, options: ConnectOptions = {}): Promise<Client> {
  const client = await connect(server.url, options);
  open.push(client);
  return client;
}

async function until(condition: () => boolean): Promise<void> {
  for (let i = 0; i < 500 && !condition(); i++) await sleep(10);
  assert.ok(condition());
}

test('chunks, result, log-probabilities of two choices', async () => {
  const server = await serve((message, reply) => {
    if (message['t'] !== 'generate') return;
    reply(accepted(message['stream']));
    reply({
      t: 'tokens', streams: packed('u32', 1, 1), starts: packed('u32', 0, 0), choices: packed('u16', 0, 1),
      counts: packed('u16', 2, 1), ids: packed('u32', 5, 6, 7), texts: ['ab', 'ü'],
      logprobs: {
        entries: packed('u32', 0), top: Uint8Array.of(1), chosen: packed('f32', -0.5, -1), top_ids: packed('u32', 5, 9),
        top_logprobs: packed('f32', -0.5, -0.25),
      },
    });
    reply(finished(1, 2, { reason: 'stop', stop: '#', text: ' end' }));
    reply(finished(1, 1, { choice: 1 }));
    reply(done(1, 3));
  });
  const client = await connected(server);
  assert.equal(client.info.model, 'm');
  const stream = client.generate('hi', { n: 2, logprobs: 1, logitBias: { 5: 1.5 }, stop: '#' });
  const texts = ['', ''];
  for await (const chunk of stream) texts[chunk.choice] += chunk.text;
  assert.deepEqual(texts, ['ab end', 'ü']);
  const result = await stream.result();
  assert.equal(result.text, 'ab end');
  assert.deepEqual(result.choices.map((choice) => choice.tokenIds), [[5, 6], [7]]);
  assert.deepEqual([result.finishReason, result.stop, result.choices[1]!.finishReason], ['stop', '#', 'length']);
  assert.deepEqual(result.usage, { prompt: 3, completion: 3, cached: 0 });
  assert.equal(result.seed, 2n ** 63n - 1n);
  assert.equal(result.timings.server.totalMs, 60_000);
  assert.deepEqual(result.logprobs![1], { logprob: -1, top: [{ tokenId: 9, logprob: -0.25 }] });
  const asked = server.seen.find((message) => message['t'] === 'generate')!;
  assert.deepEqual(asked['params'], { n: 2, logprobs: 1, logit_bias: { 5: 1.5 }, stop: ['#'] });
});

test('leaving the loop, and aborting, cancels', async () => {
  const server = await serve((message, reply) => {
    const stream = message['stream'];
    if (message['t'] === 'generate') {
      reply(accepted(stream));
      reply(tokens(stream, 0, ['a']));
    } else if (message['t'] === 'cancel') {
      reply(finished(stream, 1, { reason: 'cancelled' }));
      reply(done(stream, 1));
    }
  });
  const client = await connected(server);
  const aborter = new AbortController();
  const streams = [client.generate('one'), client.generate('two', { signal: aborter.signal }), client.generate('three')];
  for await (const chunk of streams[0]!) {
    assert.equal(chunk.text, 'a');
    break;
  }
  aborter.abort();
  const reading = (async () => {
    for await (const chunk of streams[2]!) if (chunk.text) throw new Error('mine');
  })();
  await assert.rejects(reading, /mine/);
  for (const stream of streams) assert.equal((await stream.result()).finishReason, 'cancelled');
  for await (const chunk of streams[0]!) assert.fail(`read after its loop was left: ${chunk.text}`);
  assert.equal(client.numStreams, 0);
});

test('errors have a class, a code, the field as it was written, and when to try again', async () => {
  const server = await serve((message, reply) => {
    if (message['t'] !== 'generate') return;
    const stream = message['stream'];
    if (message['prompt'] === 'field') {
      reply({ t: 'error', code: 'invalid_request', message: 'too low', stream, field: 'params.max_tokens' });
    } else if (message['prompt'] === 'new') {
      reply({ t: 'error', code: 'of_tomorrow', message: 'what?', stream });
    } else {
      reply(accepted(stream));
      reply(tokens(stream, 0, ['a']));
      reply({ t: 'error', code: 'overloaded', message: 'full', stream, retry_after_ms: 70 });
    }
  });
  const client = await connected(server);
  await assert.rejects(client.generate('field').result(), (error) => {
    assert.ok(error instanceof InvalidRequest && error instanceof Error);
    assert.deepEqual([error.name, error.code, error.field], ['InvalidRequest', 'invalid_request', 'maxTokens']);
    return true;
  });
  await assert.rejects(client.generate('new').result(), (error) => {
    assert.ok(error instanceof PagewireError);
    return error.code === 'of_tomorrow';
  });
  const texts: string[] = [];
  await assert.rejects(
    async () => {
      for await (const chunk of client.generate('full')) texts.push(chunk.text);
    },
    (error) => error instanceof Overloaded && error.retryAfterMs === 70,
  );
  assert.deepEqual(texts, ['a']);
  // @ts-expect-error: the compiler finds it, too
  assert.throws(() => client.generate('x', { maxtokens: 3 }), (error: PagewireError) => error.field === 'maxtokens');
  assert.throws(() => client.generate([-1]), (error: PagewireError) => error.field === 'prompt');
  assert.throws(() => client.generate('\ud800'), (error: PagewireError) => error.field === 'prompt');
  assert.throws(() => client.generate('x'.repeat(2 ** 20)), (error: PagewireError) => error.field === 'prompt');
});

test('a stream goes on after its connection broke: nothing lost, nothing doubled', async () => {
  let isFirst = true;
  const server = await serve((message, reply) => {
    const stream = message['stream'];
    if (message['t'] === 'generate') {
      reply(accepted(stream, 'key'));
      reply(tokens(stream, 0, ['a', 'b', 'c']));
    } else if (message['t'] === 'resume') {
      assert.deepEqual([message['request_id'], message['resume_key']], ['r1', 'key']);
      const [received] = new Uint32Array(new Uint8Array(message['received']).buffer);
      if (isFirst) {
        isFirst = false;
        reply({ t: 'error', code: 'unavailable', message: 'not yet', stream, retry_after_ms: 30 });
        return;
      }
      reply(accepted(stream, 'key'));
      reply(tokens(stream, received!, ['a', 'b', 'c', 'd', 'e'].slice(received)));
      reply(finished(stream, 5));
      reply(done(stream, 5));
    }
  });
  const client = await connected(server);
  const stream = client.generate('hi');
  let text = '';
  for await (const chunk of stream) {
    text += chunk.text;
    if (text === 'abc') {
      server.shut();
      await sleep(20);
      await server.open();
    }
  }
  assert.equal(text, 'abcde');
  const result = await stream.result();
  assert.deepEqual(result.tokenIds, [100, 101, 102, 103, 104]);
  assert.equal(result.requestId, 'r1');

  const rest = await client.resume({ requestId: 'r1', resumeKey: 'key', received: [4] }).result();
  assert.deepEqual([rest.text, rest.tokenIds], ['e', [104]]);
});

test('an end that the user found reaches the server over the next connection', async () => {
  const server = await serve((message, reply) => {
    const stream = message['stream'];
    if (message['t'] === 'generate') {
      reply(accepted(stream, 'key'));
      reply(tokens(stream, 0, ['a', 'b', 'c']));
    } else if (message['t'] === 'resume') {
      reply(accepted(stream, 'key'));
    } else if (message['t'] === 'finish') {
      assert.deepEqual([message['choice'], message['at']], [0, 2]);
      reply(finished(stream, 2, { reason: 'stop' }));
      reply(done(stream, 2));
    }
  });
  const client = await connected(server);
  const stream = client.generate('hi');
  for await (const chunk of stream) {
    if (chunk.text !== 'abc') continue;
    server.shut();
    await sleep(20);
    stream.finish(2);
    stream.finish(2, 1); // is none
    await server.open();
  }
  assert.deepEqual((await stream.result()).tokenIds, [100, 101]);
});

test('a stream that cannot go on ends with ConnectionLost, and the next one works', async () => {
  const server = await serve((message, reply) => {
    const stream = message['stream'];
    if (message['t'] === 'generate') {
      reply(accepted(stream, message['prompt']));
      if (message['prompt'] === 'short') {
        reply(finished(stream, 0));
        reply(done(stream, 0));
      }
    } else if (message['t'] === 'resume') {
      reply({ t: 'error', code: 'unknown_stream', message: 'no such stream', stream, field: 'request_id' });
    }
  });
  const client = await connected(server);
  const streams = [client.generate(''), client.generate('forgotten')];
  await until(() => streams.every((stream) => stream.requestId !== undefined));
  server.shut();
  await server.open();
  for (const stream of streams) await assert.rejects(stream.result(), ConnectionLost);
  assert.equal((await client.generate('short').result()).finishReason, 'length');
});

test('a server that was restarted, one that talks nonsense, and one that falls silent', async () => {
  let mode = 'forget';
  const server = await serve((message, reply) => {
    if (message['t'] !== 'generate') return;
    if (mode === 'forget') reply({ t: 'error', code: 'protocol', message: 'hello?', field: 'hello', stream: message['stream'] });
    if (mode === 'nonsense') reply({ t: '', raw: Uint8Array.of(1, 0xc1) });
    if (mode === 'gap') {
      reply(accepted(message['stream']));
      reply(tokens(message['stream'], 3, ['x']));
    }
  });
  const client = await connected(server);
  for (mode of ['forget', 'nonsense', 'gap']) {
    await client.waitReady(1000);
    const kind = mode === 'gap' ? /tokens from 3 follow 0/ : /restarted|no message/;
    await assert.rejects(client.generate('x').result(), kind);
  }
  mode = 'silent';
  await client.waitReady(1000);
});

test('CURVE', async () => {
  const server = await serve(() => undefined, true);
  const pair = curveKeyPair();
  const curve = { serverKey: server.keys.publicKey, publicKey: pair.publicKey, secretKey: pair.secretKey };
  const client = await connected(server, { curve });
  assert.equal(client.info.server, 'test');
  await assert.rejects(connect(server.url), Unauthorized);
  const stranger = { ...curve, serverKey: curveKeyPair().publicKey };
  await assert.rejects(connect(server.url, { curve: stranger, timeoutMs: 500 }), Unauthorized);
  await assert.rejects(connect(server.url, { curve: { ...curve, serverKey: 'short' } }), ConfigError);
});

test('nobody there', async () => {
  await assert.rejects(connect('ipc:///nowhere/at.all'), ConnectionLost);
  await assert.rejects(connect('ipc:///nowhere/at.all', { timeoutMs: 50 }), ConnectionLost);
  await assert.rejects(connect('http://localhost', { timeoutMs: 50 }), ConfigError);
});
