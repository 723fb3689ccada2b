/** How long to wait before one connects again: not at all, then longer each time, and nobody as long as his neighbour. */

const FIRST_MS = 50;
const LONGEST_MS = 2000;

/**
 * Pauses between attempts: none, then up to 50 ms, doubled each time, up to 2 s. Each is drawn from its upper half, so that
 * clients which lost one server at one moment do not all come back at another.
 */
export class Backoff {
  #nextMs = 0;
  readonly #chance: () => number;

  /** @param chance uniform in [0, 1). */
  constructor(chance: () => number = Math.random) {
    this.#chance = chance;
  }

  /** The pause before the attempt that is due. */
  next(): number {
    const pause = this.#nextMs;
    this.#nextMs = Math.min(Math.max(FIRST_MS, 2 * pause), LONGEST_MS);
    return pause * this.#share();
  }

  /** A connection was good: the next attempt is a first one. */
  reset(): void {
    this.#nextMs = 0;
  }

  /** First and longest pause for libzmq, which tries again by itself where nobody listens. */
  ownRetries(): [number, number] {
    const share = this.#share();
    return [Math.round(FIRST_MS * share), Math.round(LONGEST_MS * share)];
  }

  #share(): number {
    return 0.5 + 0.5 * this.#chance();
  }
}
