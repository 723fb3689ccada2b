/** Keys of CURVE, ZeroMQ's own encryption and authentication. */

import { readFileSync } from 'node:fs';
import { ConfigError } from './errors.js';

/** CURVE keys: texts of 40 characters in Z85. */
export interface CurveKeys {
  /** The server's public key. */
  serverKey: string;
  publicKey: string;
  secretKey: string;
}

/** Keys, or the server's and the file of our own ones that `pagewire keys curve new` makes. */
export type CurveOption = CurveKeys | { serverKey: string; keyFile: string };

/** @throws ConfigError the file holds no keys. */
export function loadKeys(curve: CurveOption): CurveKeys {
  if (!('keyFile' in curve)) return curve;
  try {
    const { public: publicKey, secret: secretKey } = JSON.parse(readFileSync(curve.keyFile, 'utf8'));
    return { serverKey: curve.serverKey, publicKey, secretKey };
  } catch (error) {
    throw new ConfigError(`${curve.keyFile} is no file of keys: ${(error as Error).message}`, { field: 'keyFile' });
  }
}
