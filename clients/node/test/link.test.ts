import assert from 'node:assert/strict';
import { once } from 'node:events';
import { createServer } from 'node:net';
import type { AddressInfo } from 'node:net';
import { test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { Router } from 'zeromq';
import { Backoff } from '../dist/backoff.js';
import { Link } from '../dist/link.js';
import type { FromClient } from '../dist/messages.js';
import { TestServer, WELCOME } from './server.js';

const STARTING: FromClient = { t: 'error', code: 'unavailable', message: 'starting', retry_after_ms: 1000 };

async function until(condition: () => boolean): Promise<void> {
  for (let i = 0; !condition(); i++) {
    assert.ok(i < 3000, 'timed out');
    await sleep(5);
  }
}

function linked(url: string): { link: Link; told: string[] } {
  const told: string[] = [];
  const link = new Link(url, 'test', undefined, {
    onMessage: () => undefined,
    onLost: () => told.push('lost'),
    onWelcome: () => told.push('welcome'),
  });
  return { link, told };
}

test('pauses double and are drawn from their upper half', () => {
  for (const [chance, share] of [[0, 0.5], [0.5, 0.75], [1, 1]] as const) {
    const backoff = new Backoff(() => chance);
    for (let round = 0; round < 2; round++) {
      const pauses = Array.from({ length: 12 }, () => backoff.next() / share);
      assert.deepEqual([...pauses.slice(0, 4), pauses.at(-1)], [0, 50, 100, 200, 2000]);
      backoff.reset();
    }
    assert.deepEqual(backoff.ownRetries(), [Math.round(50 * share), 2000 * share]);
  }
});

test('a hello is said again only when the one before was refused', async () => {
  const server = await new TestServer(() => undefined).open();
  server.greetings = [STARTING, undefined];
  const { link } = linked(server.url);
  await until(() => server.seen.length === 2);
  await sleep(1500); // more than a heartbeat
  assert.deepEqual(server.seen.map((message) => message['t']), ['hello', 'hello']);
  await link.close();
  server.close();
});

test('a second welcome is another connection as far as streams go', async () => {
  let isAgain = false;
  const server = await new TestServer((message, reply) => {
    if (message['t'] !== 'hello' || isAgain) return;
    isAgain = true;
    reply(WELCOME);
  }).open();
  const { link, told } = linked(server.url);
  await until(() => told.length === 3);
  assert.deepEqual(told, ['welcome', 'lost', 'welcome']);
  await link.close();
  server.close();
});

test('a server that hangs up at once is not called in a tight loop', async () => {
  const calls: number[] = [];
  const proxy = createServer((socket) => {
    calls.push(performance.now());
    socket.on('error', () => undefined).destroy();
  });
  await new Promise<void>((resolve) => proxy.listen(0, '127.0.0.1', resolve));
  const { link, told } = linked(`tcp://127.0.0.1:${(proxy.address() as AddressInfo).port}`);
  await until(() => calls.length === 4);
  const gaps = calls.slice(1).map((at, i) => at - calls[i]!);
  assert.ok(gaps.every((gap, i) => gap >= 0.9 * 0.5 * 50 * 2 ** i), `${gaps}`);
  await link.close();
  await new Promise((resolve) => proxy.close(resolve));
  assert.deepEqual(told, ['lost'], 'four without a word are a refusal');
});

test('what is sent waits for the server that comes', async () => {
  const proxy = createServer((socket) => socket.on('error', () => undefined).destroy());
  await new Promise<void>((resolve) => proxy.listen(0, '127.0.0.1', resolve));
  const { port } = proxy.address() as AddressInfo;
  const { link } = linked(`tcp://127.0.0.1:${port}`);
  link.send({ t: 'cancel', stream: 7 });
  await once(proxy, 'connection');
  await new Promise((resolve) => proxy.close(resolve));
  const router = new Router({ linger: 0 });
  await router.bind(`tcp://127.0.0.1:${port}`);
  const seen = [];
  for (let i = 0; i < 2; i++) seen.push((await router.receive())[1]!.toString('latin1'));
  assert.match(seen[0]!, /hello/);
  assert.match(seen[1]!, /cancel/);
  await link.close();
  router.close();
});
