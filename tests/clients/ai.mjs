// Vercel's `ai` over chat and Responses: node ai.mjs URL MODEL; prints what came, one JSON object per route.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const place = z.object({ city: z.string(), country: z.string() });

for (const route of ["chat", "responses"]) {
  const model = openai[route](name);
  const asked = { model, temperature: 0, maxRetries: 0 };
  const called = [];
  const weather = tool({
    description: "Weather of a place now",
    inputSchema: z.object({ place }),
    execute: async (input) => (called.push(input), { sky: "sunny", celsius: 21 }),
  });
  const done = await generateText({
    ...asked,
    prompt: "What is the weather in Paris, France? Use the tool.",
    tools: { weather },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
    stopWhen: stepCountIs(2),
    maxOutputTokens: 80,
  });
  if (called.length === 0 || done.steps.length !== 2) throw new Error(`${route}: ${JSON.stringify(done.steps)}`);
  const stream = streamText({ ...asked, prompt: "Count to five.", maxOutputTokens: 24 });
  let streamed = "";
  for await (const part of stream.textStream) streamed += part;
  if (!streamed || !(await stream.finishReason)) throw new Error(`${route}: the stream has no end`);
  const { object } = await generateObject({
    ...asked,
    // Bounds, because a small model does not end lists and texts by itself.
    schema: z.object({
      name: z.string().max(40),
      steps: z.array(z.object({ title: z.string().max(40), minutes: z.int() })).max(2),
    }),
    prompt: "Tea in two steps: boil water for 3 minutes, steep for 4.",
    maxOutputTokens: 200,
  });
  let refused = null;
  try {
    await generateText({ ...asked, model: openai[route]("nothing"), prompt: "Hi" });
  } catch (error) {
    refused = { status: error.statusCode, name: error.name };
  }
  if (refused?.status !== 404) throw new Error(`${route}: ${JSON.stringify(refused)}`);
  console.log(JSON.stringify({ route, called, text: done.text, streamed, object, refused }));
}
