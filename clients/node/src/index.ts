/** Client for Pagewire: see `connect`. */

export { Client, connect } from './client.js';
export type { ConnectOptions, Load, ServerInfo } from './client.js';
export * from './errors.js';
export type { CurveKeys, CurveOption } from './keys.js';
export type { ChatMessage, ChatOptions, GenerateOptions, SamplingOptions } from './request.js';
export type * from './result.js';
export type { Ticket } from './state.js';
export { Stream } from './stream.js';
