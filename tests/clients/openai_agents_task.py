"""OpenAI's Agents SDK: an agent that must call a tool and then answers, whole and as a stream, over both routes."""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

url, name = sys.argv[1:]
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


class Place(BaseModel):
    city: str
    country: str


called: list[Place] = []


@function_tool
def weather(place: Place) -> str:
    """Return the weather of a place."""
    called.append(place)
    return "Sunny, 21 degrees."


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        called.clear()
        agent = Agent(
            name="Guide",
            instructions="Answer in one sentence.",
            model=kind(name, openai_client=client),
            model_settings=ModelSettings(temperature=0, max_tokens=80, tool_choice="required"),
            tools=[weather],
        )
        done = await Runner.run(agent, "What is the weather in Paris, France?", max_turns=4)
        streamed = Runner.run_streamed(agent, "What is the weather in Rome, Italy?", max_turns=4)
        events = [event.type async for event in streamed.stream_events()]
        assert len(called) >= 2 and done.final_output and streamed.final_output, (called, done, streamed)
        print(kind.__name__, called, done.final_output, len(events), "events", streamed.final_output)


asyncio.run(main())
