/** The running servers of this user and machine, as `pagewire serve` records them; a folder each, with a `server.json`. */

import { lstat, mkdir, readdir, readFile } from 'node:fs/promises';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { ConfigError, ConnectionLost } from './errors.js';

/**
 * Where the newest server of this user is reached.
 *
 * @throws ConnectionLost there is none.
 * @throws ConfigError the folder of records is not private to this user.
 */
export async function findUrl(): Promise<string> {
  const base = await privateFolder();
  const records: { url: string; started: number }[] = [];
  for (const entry of await readdir(base, { withFileTypes: true })) {
    if (!entry.isDirectory()) continue;
    try {
      const record = JSON.parse(await readFile(join(base, entry.name, 'server.json'), 'utf8'));
      if (isAlive(record.pid) && !(await isRefused(record.url))) records.push(record);
    } catch {
      // It is starting, or leaving.
    }
  }
  const [newest] = records.sort((a, b) => b.started - a.started);
  if (newest !== undefined) return newest.url;
  const url = `ipc://${join(base, 'server.sock')}`;
  if (await isRefused(url)) {
    throw new ConnectionLost('no server of yours runs on this machine; start one with `pagewire serve`, or give its URL');
  }
  return url;
}

/** Nobody can listen there: an ipc endpoint whose socket is missing, or was left behind by a server that died. */
export async function isRefused(url: string): Promise<boolean> {
  if (!url.startsWith('ipc://')) return false;
  return new Promise((resolve) => {
    const probe = connect(url.slice('ipc://'.length));
    const tell = (isDead: boolean) => (probe.destroy(), resolve(isDead));
    probe.once('connect', () => tell(false));
    probe.once('error', (error: NodeJS.ErrnoException) => tell(error.code === 'ENOENT' || error.code === 'ECONNREFUSED'));
  });
}

/** `$XDG_RUNTIME_DIR/pagewire` where the session has such a folder, else `pagewire-<user id>` among temporary files. */
async function privateFolder(): Promise<string> {
  const runtime = process.env['XDG_RUNTIME_DIR'] ?? '';
  const isSession = runtime.startsWith('/') && (await isPrivate(runtime));
  const folder = isSession ? join(runtime, 'pagewire') : join(tmpdir(), `pagewire-${process.getuid?.()}`);
  await mkdir(folder, { mode: 0o700 }).catch(() => undefined);
  if (!(await isPrivate(folder))) throw new ConfigError(`${folder} must be a folder of yours that nobody else may enter`);
  return folder;
}

async function isPrivate(folder: string): Promise<boolean> {
  const status = await lstat(folder).catch(() => undefined);
  return status !== undefined && status.isDirectory() && status.uid === process.getuid?.() && (status.mode & 0o077) === 0;
}

function isAlive(pid: unknown): boolean {
  try {
    return Number.isInteger(pid) && process.kill(pid as number, 0);
  } catch {
    return false;
  }
}
