"""smolagents: an agent that calls tools, and one that writes code; both end by an answer or after their steps."""

import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

url, name = sys.argv[1:]
model = OpenAIModel(model_id=name, api_base=f"{url}/v1", api_key="none", temperature=0, max_tokens=160)


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


for kind in (ToolCallingAgent, CodeAgent):
    agent = kind(tools=[multiply], model=model, max_steps=2, verbosity_level=0)
    answer = agent.run("What is 6 times 7? Use the tool multiply, then give the final answer.")
    steps = [step for step in agent.memory.steps if hasattr(step, "model_output_message")]
    assert any(step.model_output_message for step in steps), agent.memory.steps
    print(kind.__name__, repr(answer), len(steps), "steps")
