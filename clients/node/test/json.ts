/** The golden vectors: what JSON cannot say is marked in them, see `transport/vectors/README.md`. */

import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { join } from 'node:path';

const FOLDER =
  process.env['PAGEWIRE_VECTORS'] ?? fileURLToPath(new URL('../../../transport/vectors', import.meta.url));

export interface Vector {
  name: string;
  from: 'client' | 'server';
  frame: string;
  message: Record<string, unknown>;
  full: Record<string, unknown>;
  runs: {
    stream: number;
    choice: number;
    start: number;
    ids: number[];
    text: string | null;
    logprobs: { chosen: number; top: [number, number][] }[] | null;
  }[];
  code: string;
}

export function vectors(name: string): Vector[] {
  const file = JSON.parse(readFileSync(join(FOLDER, name), 'utf8'));
  if (file.format !== 1) throw new Error(`${name} has format ${file.format}`);
  return file.vectors;
}

/** A value of a vector, unmarked. */
export function plain(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(plain);
  if (typeof value !== 'object' || value === null) return value;
  const [[key, marked] = ['', undefined], ...others] = Object.entries(value);
  if (others.length === 0 && key === 'hex') return new Uint8Array(Buffer.from(marked as string, 'hex'));
  if (others.length === 0 && key === 'int') return BigInt(marked as string);
  if (others.length === 0 && key === 'map') return new Map(plain(marked) as [unknown, unknown][]);
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, plain(item)]));
}

/** The same with integers of one type and bytes of one class, so that it can be compared. */
export function comparable(value: unknown): unknown {
  if (typeof value === 'bigint') return Number(value);
  if (value instanceof Uint8Array) return Buffer.from(value).toString('hex');
  if (Array.isArray(value)) return value.map(comparable);
  if (value instanceof Map) return comparable(Object.fromEntries(value));
  if (typeof value !== 'object' || value === null) return value;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, comparable(item)]));
}
