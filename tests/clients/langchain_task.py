"""LangChain: tools bound to a model, their results, nested structured output and streams, over chat and Responses."""

import sys

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

url, name = sys.argv[1:]


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


class Step(BaseModel):
    title: str = Field(max_length=40)
    minutes: int = Field(ge=0, le=99)


class Recipe(BaseModel):
    name: str = Field(max_length=40)
    steps: list[Step] = Field(max_length=2)


for uses_responses in (False, True):
    model = ChatOpenAI(
        model=name, base_url=f"{url}/v1", api_key="none", temperature=0, max_retries=0, use_responses_api=uses_responses
    )
    messages = [HumanMessage("What is 6 times 7? Use the tool.")]
    answer = model.bind_tools([multiply], tool_choice="required").invoke(messages, max_tokens=60)
    [call] = answer.tool_calls
    messages += [answer, multiply.invoke(call)]
    last = model.bind_tools([multiply]).invoke(messages, max_tokens=40)
    assert last.content or last.tool_calls, last
    recipe = model.with_structured_output(Recipe, method="json_schema").invoke("Tea in two steps.", max_tokens=200)
    assert isinstance(recipe, Recipe), recipe
    streamed = "".join(chunk.text for chunk in model.stream("Count to three.", max_tokens=16))
    assert streamed
    print("responses" if uses_responses else "chat", call["args"], last.text, recipe, repr(streamed))
