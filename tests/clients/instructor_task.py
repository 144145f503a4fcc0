"""instructor: nested models by tools and by a JSON schema, over chat and Responses, and a list as a stream."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

url, name = sys.argv[1:]


class Step(BaseModel):
    title: str = Field(max_length=40)
    minutes: int = Field(ge=0, le=99)


class Recipe(BaseModel):
    name: str = Field(max_length=40)
    steps: list[Step] = Field(max_length=2)


client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
question = {"messages": [{"role": "user", "content": "Tea in two steps: boil water for 3 minutes, steep for 4."}]}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    asked = {**question, "model": name, "temperature": 0, "max_tokens": 200, "max_retries": 0}
    recipe = instructor.from_openai(client, mode=mode).create(response_model=Recipe, **asked)
    assert isinstance(recipe, Recipe), recipe
    print(mode, recipe)
patched = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
recipe = patched.create(response_model=Recipe, **{**question, "model": name, "temperature": 0, "max_retries": 0})
print(instructor.Mode.RESPONSES_TOOLS, recipe)
