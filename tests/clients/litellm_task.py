"""litellm: a tool's call and its result, a stream, Responses, and the errors that its fallbacks go by."""

import json
import sys

import litellm

url, name = sys.argv[1:]
asked = {"model": f"openai/{name}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "weather", "description": "Weather now.", "parameters": parameters}}
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
first = litellm.completion(**asked, messages=messages, tools=[tool], tool_choice="required", max_tokens=60)
message = first.choices[0].message
[call] = message.tool_calls
assert call.function.name == "weather" and isinstance(json.loads(call.function.arguments), dict), call
messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}]
second = litellm.completion(**asked, messages=messages, tools=[tool], max_tokens=40)
assert second.choices[0].message.content or second.choices[0].message.tool_calls
chunks = list(litellm.completion(**asked, messages=messages[:1], max_tokens=16, stream=True))
whole = litellm.stream_chunk_builder(chunks)
assert whole.choices[0].message.content and whole.choices[0].finish_reason, whole
response = litellm.responses(**asked, input="Count to three.", max_output_tokens=16)
assert response.output, response
errors = {}
for case, values in {
    "too long": {"messages": [{"role": "user", "content": "word " * 200_000}]},
    "too long an answer": {"messages": messages[:1], "max_tokens": 10_000_000},
    "no such model": {"messages": messages[:1], "model": "openai/nothing"},
    "no such field value": {"messages": messages[:1], "temperature": 9},
}.items():
    try:
        litellm.completion(**{**asked, **values})
        errors[case] = None
    except Exception as error:
        errors[case] = type(error).__name__
expected = ["ContextWindowExceededError"] * 2 + ["NotFoundError", "BadRequestError"]
assert list(errors.values()) == expected, errors
print(call.function.arguments, second.choices[0].message.content, errors)
