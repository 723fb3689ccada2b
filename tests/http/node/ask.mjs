// Asks a server through OpenAI's SDK for JavaScript, unmodified; prints one JSON object for the test to judge.
// Usage: node ask.mjs FOLDER_WITH_NODE_MODULES URL
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const [folder, baseURL] = process.argv.slice(2);
const { default: OpenAI } = await import(pathToFileURL(createRequire(`${folder}/package.json`).resolve('openai')));
const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 });
const messages = [{ role: 'user', content: 'hi' }];
const told = {};

const whole = await client.chat.completions.create({ model: 'bytes', messages, n: 2, logprobs: true, top_logprobs: 1 });
told.whole = whole.choices.map((choice) => choice.message.content);
told.logprob = whole.choices[1].logprobs.content[0].top_logprobs[0].logprob;

told.streamed = '';
const stream = await client.chat.completions.create({
  model: 'bytes', messages, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  told.streamed += chunk.choices[0]?.delta.content ?? '';
  told.usage = chunk.usage?.completion_tokens;
}

try {
  await client.chat.completions.create({ model: 'bytes', messages, temperature: -1 });
} catch (error) {
  told.refused = [error.constructor.name, error.status, error.param, error.code];
}

try {
  await client.chat.completions.create({ model: 'bytes', messages, user: 'never answered' }, { timeout: 200 });
} catch (error) {
  told.late = error.constructor.name;
}

const left = await client.chat.completions.create({ model: 'bytes', messages, stream: true });
for await (const chunk of left) {
  told.first = chunk.choices[0].delta.content;
  break; // aborts the request
}
console.log(JSON.stringify(told));
