// The npm package `openai` against a server: node openai.mjs URL MODEL; prints what came, one JSON object.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content: "Count to five." }], temperature: 0, max_tokens: 24 };

const whole = await client.chat.completions.create(asked);
let streamed = "", finish = null, usage = null;
for await (const chunk of await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  finish = chunk.choices[0]?.finish_reason ?? finish;
  usage = chunk.usage ?? usage;
}
const schema = { type: "object", properties: { n: { type: "integer" } }, required: ["n"], additionalProperties: false };
const parsed = await client.chat.completions.parse({
  ...asked,
  response_format: { type: "json_schema", json_schema: { name: "number", schema, strict: true } },
});
let refused = null;
try {
  await client.chat.completions.create({ ...asked, model: "nothing" });
} catch (error) {
  refused = { status: error.status, name: error.constructor.name };
}
const models = [];
for await (const each of client.models.list()) models.push(each.id);
const response = await client.responses.create({ model, input: "Count to five.", temperature: 0, max_output_tokens: 24 });

console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed,
    finish,
    tokens: [whole.usage.total_tokens, usage?.total_tokens],
    n: typeof parsed.choices[0].message.parsed?.n,
    refused,
    models,
    response: response.output_text,
  }),
);
