"""pydantic-ai: a tool whose arguments are a nested model, and an answer as a nested model, over chat and Responses."""

import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelRetry, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, name = sys.argv[1:]
provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")


class Place(BaseModel):
    city: str = Field(max_length=40)
    country: str = Field(max_length=40)


class Forecast(BaseModel):
    place: Place
    celsius: int = Field(ge=-99, le=99)


asked: list[Place] = []
refused: list[Forecast] = []


def temperature(place: Place) -> int:
    """Return the temperature of a place in degrees Celsius."""
    asked.append(place)
    return 21


def ask_again(forecast: Forecast) -> Forecast:
    """Refuse the first answer, so that the client sends the result of its call back."""
    if not refused:
        refused.append(forecast)
        raise ModelRetry("Say it again.")
    return forecast


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model, settings = kind(name, provider=provider), {"temperature": 0, "max_tokens": 200}
    # The answer is a call of the tool final_result, whose schema has $defs, as the other tool's has.
    agent = Agent(model, output_type=Forecast, model_settings=settings, tools=[temperature])
    refused.clear()
    agent.output_validator(ask_again)
    done = agent.run_sync("What is the weather in Paris, France? Use the tool temperature, then answer.")
    assert isinstance(done.output, Forecast), done.output
    native = Agent(model, output_type=NativeOutput(Forecast), model_settings=settings)
    forecast = native.run_sync("It is 21 degrees in Paris, France. Write the forecast.").output
    assert isinstance(forecast, Forecast), forecast
    print(kind.__name__, "tool called with", asked, "answer", done.output, "native", forecast)
