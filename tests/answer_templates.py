"""Chat templates of families, reduced to the marks of turns, thoughts and calls, and tokenizers that know these marks.

They are written by hand after the public templates, of which they keep what surrounds thoughts and calls: those in
llama.cpp's `models/templates` and vLLM's `examples/tool_chat_template_*.jinja`, and the formats that their parsers read
(`common/chat*.cpp`; `vllm/tool_parsers`, `vllm/reasoning`). Two templates are not there: Solar Open's is written after
vLLM's `solar_open` parsers and Upstage's logits processor for vLLM, HyperCLOVA X SEED Think 14B's after its model card
and vLLM's `hyperclovax` parsers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from chat_tokenizers import trained
from tokenizers import pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "flag": {"type": "boolean"},
        "city": {"type": "string"},
        "options": {"type": "object"},
        "places": {"anyOf": [{"type": "array"}, {"type": "null"}]},
        "text": {"type": ["string", "null"]},
    },
}
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": SCHEMA}},)


@dataclass(frozen=True)
class Family:
    """A template, the special tokens that it writes, the rows of its form, and the token that ends a turn.

    `opened` is what the generation prompt begins of a thought.
    """

    rows: tuple[str, ...]
    user: str
    assistant: str
    end: str
    answer: str
    special: tuple[str, ...] = ()
    opened: str = ""
    thinks: bool = True
    turn_end: str = ""
    prefix: str = ""
    whole: str = ""  # The template where it is none of turns, one after the other.

    @property
    def template(self) -> str:
        if self.whole:
            return self.whole
        turn = f"{{{{- {self.user!r} + m.content + {self.end!r} }}}}"
        return (
            f"{self.prefix}{{%- for m in messages %}}{{%- if m.role == 'assistant' %}}{{{{- {self.assistant!r} }}}}"
            f"{self.answer}{{{{- {self.end!r} }}}}{{%- else %}}{turn}{{%- endif %}}{{%- endfor %}}"
            f"{{%- if add_generation_prompt %}}{{{{- {self.assistant + self.opened!r} }}}}{{%- endif %}}"
        )


THOUGHT = "{%- if m.@FIELD@ %}{{- '@BEGIN@' + m.@FIELD@ + '@END@' }}{%- endif %}"
CONTENT = "{{- m.content }}"
ITEMS = "{%- for c in m.tool_calls or [] %}{%- set f = c.function %}@CALL@{%- endfor %}"
LISTED = "{%- if m.tool_calls %}{{- '@BEGIN@' }}" + ITEMS + "{{- '@END@' }}{%- endif %}"
JSON_CALL = '{{- \'{"@NAME@": "\' + f.name + \'", "@ARGUMENTS@": \' + (f.arguments | tojson) + "}" }}'
COMMA = "{{- ', ' if not loop.last else '' }}"
PYTHON_CALL = (
    "{{- f.name + '(' }}{%- for k, v in f.arguments.items() %}{{- k + '=' }}"
    "{%- if v is string %}{{- \"'\" + v + \"'\" }}{%- elif v is none %}{{- 'null' }}{%- else %}{{- v | tojson }}"
    "{%- endif %}{{- ', ' if not loop.last else '' }}{%- endfor %}{{- ')' }}"
)


def thought(begin: str = "<think>\\n", end: str = "\\n</think>\\n\\n", field: str = "reasoning_content") -> str:
    return THOUGHT.replace("@FIELD@", field).replace("@BEGIN@", begin).replace("@END@", end)


def json_call(name: str = "name", arguments: str = "arguments") -> str:
    return JSON_CALL.replace("@NAME@", name).replace("@ARGUMENTS@", arguments)


def each(call: str) -> str:
    return ITEMS.replace("@CALL@", call)


def listed(begin: str, end: str, call: str) -> str:
    return LISTED.replace("@BEGIN@", begin).replace("@END@", end).replace("@CALL@", call + COMMA)


def tagged(begin: str, name: str, key: str, end: str, is_python: bool = False) -> str:
    """A function's tag with a tag per parameter; values that are no texts are JSON, or as Python writes them."""
    value = "v | string" if is_python else "v | tojson"
    return each(
        f"{{{{- '{begin}{name}' }}}}{{%- for k, v in f.arguments.items() %}}{{{{- '{key}' }}}}"
        f"{{{{- v if v is string else {value} }}}}{{{{- @PARAMETER_END@ }}}}{{%- endfor %}}{{{{- '{end}' }}}}"
    )


CHATML = ("<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n")
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
HERMES = each("{{- '\\n<tool_call>\\n' }}" + json_call() + "{{- '\\n</tool_call>' }}")
QWEN_TAGS = tagged(
    "\\n<tool_call>\\n", "<function=' + f.name + '>\\n", "<parameter=' + k + '>\\n", "</function>\\n</tool_call>", True
).replace("@PARAMETER_END@", "'\\n</parameter>\\n'")
SEED_TAGS = tagged(
    "\\n<seed:tool_call>\\n", "<function=' + f.name + '>\\n", "<parameter=' + k + '>", "</function>\\n</seed:tool_call>"
).replace("@PARAMETER_END@", "'</parameter>\\n'")
MINIMAX_TAGS = (
    "{%- if m.tool_calls %}{{- '\\n<minimax:tool_call>\\n' }}"
    + tagged("", "<invoke name=\"' + f.name + '\">\\n", "<parameter name=\"' + k + '\">", "</invoke>\\n").replace(
        "@PARAMETER_END@", "'</parameter>\\n'"
    )
    + "{{- '</minimax:tool_call>' }}{%- endif %}"
)
GLM_TAGS = tagged(
    "\\n<tool_call>", "' + f.name + '\\n", "<arg_key>' + k + '</arg_key>\\n<arg_value>", "</tool_call>"
).replace("@PARAMETER_END@", "'</arg_value>\\n'")
GLM_TURNS = ("<|user|>\n", "<|assistant|>\n", "")
GLM_TOKENS = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_PREFIX = "{{- '[gMASK]<sop>' }}{#- <|observation|> #}"
LLAMA = tuple(f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant"))
DEEPSEEK = (
    "{%- if m.tool_calls %}{{- '<\uff5ctool\u2581calls\u2581begin\uff5c>' }}"
    + each(
        "{{- '<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>' + f.name + '\\n```json\\n'"
        " + (f.arguments | tojson) + '\\n```<\uff5ctool\u2581call\u2581end\uff5c>' + ('' if loop.last else '\\n') }}"
    )
    + "{{- '<\uff5ctool\u2581calls\u2581end\uff5c>' }}{%- endif %}"
)
KIMI = (
    "{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}"
    + each(
        "{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + (f.arguments | tojson)"
        " + '<|tool_call_end|>' }}"
    )
    + "{{- '<|tool_calls_section_end|>' }}{%- endif %}"
)
MISTRAL_ID = "{%- if c.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}"
MISTRAL_THOUGHT = (
    "{%- if m.content is string %}{{- m.content }}{%- else %}{%- for part in m.content %}"
    "{%- if part['type'] == 'thinking' %}{{- '[THINK]' + part['thinking'] + '[/THINK]' }}"
    "{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}"
)
MISTRAL = ("[INST]", "[/INST]", "")
HARMONY = (
    "{%- if m.tool_calls %}{%- if m.thinking %}"
    "{{- '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{%- endif %}"
    "{%- if m.content %}{{- '<|channel|>commentary<|message|>' + m.content + '<|end|><|start|>assistant' }}{%- endif %}"
    "{{- ' to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>'"
    " + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}{%- else %}"
    "{%- if m.thinking %}{{- '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{%- endif %}"
    "{{- '<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}{%- endif %}"
)
COHERE_CALL = (
    "{%- if m.tool_calls %}{%- if m.tool_plan %}{{- '<|START_THINKING|>' + m.tool_plan + '<|END_THINKING|>' }}"
    "{%- endif %}{{- '<|START_ACTION|>[\\n' }}"
    + each(
        '{{- \'    {"tool_call_id": "0", "tool_name": "\' + f.name + \'", "parameters": \''
        " + (f.arguments | tojson) + '}' + ('' if loop.last else ',') + '\\n' }}"
    )
    + "{{- ']<|END_ACTION|>' }}{%- else %}{%- if m.reasoning_content %}"
    "{{- '<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' }}{%- endif %}"
    "{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{%- endif %}"
)
COHERE_TOKENS = tuple(
    f"<|{name}|>"
    for name in (
        *("START_OF_TURN_TOKEN", "END_OF_TURN_TOKEN", "CHATBOT_TOKEN", "USER_TOKEN", "START_THINKING", "END_THINKING"),
        *("START_ACTION", "END_ACTION", "START_RESPONSE", "END_RESPONSE"),
    )
)

GEMMA_VALUE = (
    "{%- macro value(v) -%}{%- if v is string -%}{{- '@QUOTE@' + v + '@QUOTE@' -}}{%- elif v is boolean -%}"
    "{{- 'true' if v else 'false' -}}{%- elif v is mapping -%}{{- '{' -}}{%- for key, inner in v | dictsort -%}"
    "{{- key + ':' -}}{{- value(inner) -}}{{- ',' if not loop.last else '' -}}{%- endfor -%}{{- '}' -}}"
    "{%- elif v is sequence -%}{{- '[' -}}{%- for inner in v -%}{{- value(inner) -}}"
    "{{- ',' if not loop.last else '' -}}{%- endfor -%}{{- ']' -}}{%- else -%}{{- v -}}{%- endif -%}{%- endmacro -%}"
)
GEMMA_CALLS = "{{- '@BEGIN@call:' + f.name }}{{- value(f.arguments) }}{{- '@END@' }}"
HUNYUAN_MARKS = ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value", "think")
HUNYUAN_TAGS = (
    "{%- if m.tool_calls %}{{- '<tool_calls>\\n' }}"
    + tagged(
        "<tool_call>", "' + f.name + '<tool_sep>\\n", "<arg_key>' + k + '</arg_key>\\n<arg_value>", "</tool_call>\\n"
    ).replace("@PARAMETER_END@", "'</arg_value>\\n'")
    + "{{- '</tool_calls>' }}{%- endif %}"
)


def hunyuan(row: str, suffix: str, prefix: str = "") -> Family:
    """Hunyuan 3; `suffix` ends each mark of its checkpoint."""
    turns = [f"<\uff5chy_{role}{suffix}\uff5c>" for role in ("User", "Assistant", "eos")]
    answer, marks = thought("<think>", "</think>") + CONTENT + HUNYUAN_TAGS, []
    for mark in (f"{slash}{name}" for name in HUNYUAN_MARKS for slash in ("", "/")):
        answer = answer.replace(f"<{mark}>", f"<{mark}{suffix}>")
        marks.append(f"<{mark}{suffix}>")
    return Family((row,), turns[0], turns[1], turns[2], answer, (*turns, *marks), f"<think{suffix}>", prefix=prefix)


# An answer is a text, or blocks of thoughts and responses; results of calls stand within the turn of the answer.
APERTUS = (
    "{%- set ns = namespace(thinks=false, results=false, answers=false) %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- ']' if ns.results else '' }}{{- '<|assistant_end|>' if ns.answers else '' }}"
    "{%- set ns.results = false %}{%- set ns.answers = false %}{{- '<|user_start|>' + m.content + '<|user_end|>' }}"
    "{%- elif m.role == 'assistant' %}{{- ']' if ns.results else '' }}{%- set ns.results = false %}"
    "{{- '' if ns.answers else '<|assistant_start|>' }}{%- set ns.answers = true %}"
    "{%- if m.content is string %}{{- m.content }}{%- elif m.content is mapping %}{%- for b in m.content.blocks %}"
    "{%- if b.type == 'thoughts' %}{{- '' if ns.thinks else '<|inner_prefix|>' }}{%- set ns.thinks = true %}"
    "{%- elif b.type == 'response' %}{{- '<|inner_suffix|>' if ns.thinks else '' }}{%- set ns.thinks = false %}"
    "{%- endif %}{{- b.text }}{%- endfor %}{%- endif %}"
    + listed("<|tools_prefix|>[", "]<|tools_suffix|>", "{{- '{\"' + f.name + '\": ' + (f.arguments | tojson) + '}' }}")
    + "{%- elif m.role == 'tool' %}{{- ', ' if ns.results else '[' }}{{- m.content }}{%- set ns.results = true %}"
    "{%- endif %}{%- endfor %}{{- ']' if ns.results else '' }}"
    "{{- '<|assistant_start|>' if add_generation_prompt else '' }}"
)

# A turn's header says what follows: a thought, an answer or calls. Thoughts of earlier turns are left out.
HYPERCLOVA = (
    "{{- '<|im_start|>tool_list\\n' }}{{- tools | map(attribute='function') | list | tojson if tools else '' }}"
    "{{- '<|im_end|>\\n' }}{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- if m.reasoning_content and loop.last %}"
    "{{- '<|im_start|>assistant/think\\n' + m.reasoning_content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- if m.content %}{{- '<|im_start|>assistant\\n' + m.content + '<|im_end|>' }}"
    "{{- '\\n' if m.tool_calls else '<|endofturn|>\\n' }}{%- endif %}"
    + listed("<|im_start|>assistant -> tool/function_call\\n[", "]<|im_end|><|stop|>\\n", json_call())
    + "{%- else %}{{- '<|im_start|>' + ('tool/function_call' if m.role == 'tool' else m.role) + '\\n' }}"
    "{{- m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}"
    "{{- '/think\\n' if force_reasoning else '\\n' if skip_reasoning else '' }}{%- endif %}"
)

FAMILIES: Mapping[str, Family] = {
    "qwen2.5": Family(("tool_call",), *CHATML, CONTENT + HERMES, CHATML_TOKENS, thinks=False),
    "qwen3": Family(("think", "tool_call"), *CHATML, thought() + CONTENT + HERMES, CHATML_TOKENS),
    "qwen3.5": Family(("think", "function tags"), *CHATML, thought() + CONTENT + QWEN_TAGS, CHATML_TOKENS, "<think>\n"),
    "qwen3-coder": Family(("function tags",), *CHATML, CONTENT + QWEN_TAGS, CHATML_TOKENS, thinks=False),
    "smollm3": Family(("think", "tool_call"), *CHATML, thought() + CONTENT + HERMES, CHATML_TOKENS),
    "exaone4": Family(
        ("think", "tool_call"),
        *("[|user|]\n", "[|assistant|]\n", "[|endofturn|]\n"),
        thought() + CONTENT + HERMES,
        ("[|user|]", "[|assistant|]", "[|endofturn|]"),
        "<think>\n",
    ),
    "ernie4.5": Family(
        ("think, response", "tool_call"),
        *CHATML,
        thought("<think>\\n", "\\n</think>\\n\\n")
        + "{%- if m.content %}{{- '<response>\\n' + m.content + '\\n</response>\\n' }}{%- endif %}"
        + HERMES,
        CHATML_TOKENS,
        "<think>\n",
        prefix="{#- think_mode=True #}",
    ),
    "granite4": Family(
        ("tool_call",),
        *("<|start_of_role|>user<|end_of_role|>", "<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"),
        CONTENT + HERMES,
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        thinks=False,
    ),
    "granite3": Family(
        ("granite thoughts", "granite"),
        *("<|start_of_role|>user<|end_of_role|>", "<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"),
        thought("Here is my thought process:\\n", "\\nHere is my response:\\n")
        + CONTENT
        + listed("<|tool_call|>[", "]", json_call()),
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
    ),
    "mistral-7b": Family(
        ("mistral",),
        *MISTRAL,
        "{%- if m.tool_calls %}"
        + listed("[TOOL_CALLS] [", "]", MISTRAL_ID + json_call())
        + "{%- else %}{{- m.content }}{%- endif %}{{- '</s>' }}",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "</s>"),
        thinks=False,
        turn_end="</s>",
    ),
    "mistral-small-3.2": Family(
        ("mistral",),
        *MISTRAL,
        CONTENT
        + each(MISTRAL_ID + "{{- '[TOOL_CALLS]' + f.name + '[CALL_ID]' + c.id + '[ARGS]' + (f.arguments | tojson) }}")
        + "{{- '</s>' }}",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "</s>"),
        thinks=False,
        turn_end="</s>",
    ),
    "ministral3": Family(
        ("mistral thoughts", "mistral"),
        *MISTRAL,
        MISTRAL_THOUGHT + each("{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + (f.arguments | tojson) }}") + "{{- '</s>' }}",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "</s>"),
        turn_end="</s>",
    ),
    "llama3": Family(
        ("llama",),
        *LLAMA,
        "<|eot_id|>",
        CONTENT
        + each(
            "{%- if m.tool_calls | length > 1 %}{{- raise_exception('one call at a time') }}{%- endif %}"
            + json_call("name", "parameters")
        ),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        thinks=False,
        prefix="{#- <|python_tag|> #}",
    ),
    "llama3.2 pythonic": Family(
        ("python list",),
        *LLAMA,
        "<|eot_id|>",
        CONTENT + listed("[", "]", PYTHON_CALL),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        thinks=False,
        prefix="{#- [func_name1(params_name1=params_value1)] #}",
    ),
    "llama4": Family(
        ("llama 4",),
        *(f"<|header_start|>{role}<|header_end|>\n\n" for role in ("user", "assistant")),
        "<|eot|>",
        "{%- if m.tool_calls %}{{- '<|python_start|>' + m.content + '<|python_end|>' }}"
        + each(json_call("name", "parameters"))
        + "{%- else %}{{- m.content }}{%- endif %}",
        ("<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>", "<|python_start|>", "<|python_end|>"),
        thinks=False,
    ),
    "gemma3": Family(
        (),
        *("<start_of_turn>user\n", "<start_of_turn>model\n", "<end_of_turn>\n"),
        CONTENT,
        ("<start_of_turn>", "<end_of_turn>"),
        thinks=False,
    ),
    "phi4-mini": Family(
        ("phi",),
        *("<|user|>", "<|assistant|>", "<|end|>"),
        CONTENT + listed("<|tool_call|>[", "]<|/tool_call|>", json_call()),
        ("<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"),
        thinks=False,
        prefix="{#- <|tool|><|/tool|> #}",
    ),
    "command-r7b": Family(
        ("cohere",),
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        COHERE_CALL,
        COHERE_TOKENS,
    ),
    "command-r": Family(
        ("command-r",),
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        CONTENT + listed("\\nAction: ```json\\n[", "]\\n```", json_call("tool_name", "parameters")),
        COHERE_TOKENS[:4],
        thinks=False,
        prefix="{#- Action: directly_answer #}",
    ),
    "glm4": Family(
        ("glm",),
        *GLM_TURNS,
        "{{- m.content }}" + each("{{- f.name + '\\n' + (f.arguments | tojson) }}"),
        GLM_TOKENS,
        thinks=False,
        turn_end="<|user|>",
        prefix=GLM_PREFIX,
    ),
    "glm4.5": Family(
        ("think", "argument tags"),
        *("<|user|>\n", "<|assistant|>", ""),
        thought("\\n<think>", "</think>\\n") + CONTENT + GLM_TAGS,
        GLM_TOKENS,
        turn_end="<|user|>",
        prefix=GLM_PREFIX,
    ),
    "olmo3": Family(
        ("think", "olmo"),
        *CHATML,
        thought("<think>", "</think>")
        + CONTENT
        + "{%- if m.tool_calls %}{{- '<function_calls>\\n' }}"
        + each(PYTHON_CALL + "{{- '\\n' }}")
        + "{{- '</function_calls>' }}{%- endif %}",
        CHATML_TOKENS,
        "<think>",
    ),
    "hunyuan": Family(
        ("think, answer", "hunyuan"),
        *("<|hy_User|>", "<|hy_Assistant|>", "<|eos|>"),
        thought("<think>\\n", "\\n</think>\\n")
        + "{%- if m.content %}{{- '<answer>\\n' + m.content + '\\n</answer>' }}{%- endif %}"
        + listed("<tool_calls>[", "]</tool_calls>", json_call()),
        ("<|hy_User|>", "<|hy_Assistant|>", "<|eos|>"),
    ),
    "hunyuan-a13b": Family(
        ("think, unsaid answer", "hunyuan"),
        *("<|startoftext|>", "<|extra_0|>", "<|eos|>"),
        thought("<think>\\n", "\\n</think>\\n") + CONTENT + listed("<tool_calls>[", "]</tool_calls>", json_call()),
        ("<|startoftext|>", "<|extra_0|>", "<|eos|>"),
        prefix='{#- <tool_calls>[{"name": "func_name1"}]</tool_calls> #}',
    ),
    "granite3.3": Family(
        ("think, told response", "granite"),
        *("<|start_of_role|>user<|end_of_role|>", "<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"),
        thought("<think>", "</think>") + CONTENT + listed("<|tool_call|>[", "]", json_call()),
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
        prefix="{#- <response></response> #}",
    ),
    "seed-oss": Family(
        ("seed",),
        *("<seed:bos>user\n", "<seed:bos>assistant\n", "<seed:eos>"),
        thought("<seed:think>", "</seed:think>\\n") + CONTENT + SEED_TAGS,
        ("<seed:bos>", "<seed:eos>", "<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
    ),
    "apertus": Family(
        ("apertus",),
        *("", "", "<|assistant_end|>", ""),
        (
            *("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>", "<|inner_prefix|>"),
            *("<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"),
        ),
        whole=APERTUS,
    ),
    "gemma4": Family(
        ("gemma 4",),
        *("<|turn>user\n", "<|turn>model\n", "<turn|>\n"),
        thought("<|channel>thought\\n", "\\n<channel|>")
        + each(GEMMA_CALLS.replace("@BEGIN@", "<|tool_call>").replace("@END@", "<tool_call|>"))
        + CONTENT,
        (
            *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
            "<|tool_response>",
        ),
        prefix=GEMMA_VALUE.replace("@QUOTE@", '<|"|>'),
    ),
    "functiongemma": Family(
        ("function gemma",),
        *("<start_of_turn>user\n", "<start_of_turn>model\n", "<end_of_turn>\n"),
        CONTENT + each(GEMMA_CALLS.replace("@BEGIN@", "<start_function_call>").replace("@END@", "<end_function_call>")),
        (
            *("<start_of_turn>", "<end_of_turn>", "<start_function_call>", "<end_function_call>", "<escape>"),
            "<start_function_response>",
        ),
        thinks=False,
        prefix=GEMMA_VALUE.replace("@QUOTE@", "<escape>"),
    ),
    "hunyuan3": hunyuan(
        "hunyuan 3", ":opensource", "{%- set HYTK = ':opensource' %}{%- set sep = '<tool_sep{}>'.format(HYTK) %}"
    ),
    "hunyuan3-preview": hunyuan("hunyuan 3 preview", ""),
    "solar-open": Family(
        ("solar",),
        *("<|begin|>user<|content|>", "<|begin|>assistant", ""),
        thought("<|think|>", "<|end|><|begin|>assistant", "reasoning")
        + "{%- if m.content %}{{- '<|content|>' + m.content }}"
        + "{{- '<|end|><|begin|>assistant' if m.tool_calls else '' }}{%- endif %}"
        + "{%- if m.tool_calls %}{{- '<|tool_calls|>' }}"
        + each(
            "{{- '<|tool_call:begin|>' + c.id + '<|tool_call:name|>' + f.name + '<|tool_call:args|>' +"
            " (f.arguments | tojson) + '<|tool_call:end|>' }}"
        )
        + "{{- '<|calls|>' }}{%- else %}{{- '<|flush|>' if loop.last else '<|end|>' }}{%- endif %}",
        (
            *("<|begin|>", "<|end|>", "<|content|>", "<|think|>", "<|flush|>", "<|calls|>", "<|tool_calls|>"),
            *(f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end")),
        ),
        turn_end="<|flush|>",
    ),
    "hyperclova x": Family(
        ("hyperclova x",),
        *("", "", "", ""),
        ("<|im_start|>", "<|im_end|>", "<|endofturn|>", "<|stop|>", "<|endoftext|>"),
        turn_end="<|endofturn|>",
        whole=HYPERCLOVA,
    ),
    "internlm3": Family(
        ("internlm",),
        *CHATML,
        CONTENT
        + each("{{- '<|action_start|><|plugin|>\\n' }}" + json_call("name", "parameters") + "{{- '<|action_end|>' }}"),
        (*CHATML_TOKENS, "<|action_start|>", "<|action_end|>", "<|plugin|>"),
        thinks=False,
    ),
    "jamba": Family(
        ("hunyuan",),
        *("<|bom|><|user|> ", "<|bom|><|assistant|> ", "<|eom|>"),
        CONTENT + listed("<tool_calls>[\\n  ", "\\n]</tool_calls>", json_call()),
        ("<|bom|>", "<|eom|>", "<|user|>", "<|assistant|>"),
        thinks=False,
    ),
    "phi3": Family(
        (),
        *("<|user|>\n", "<|assistant|>\n", "<|end|>\n"),
        CONTENT,
        ("<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        thinks=False,
    ),
    "olmo2": Family(
        (),
        *("<|user|>\n", "<|assistant|>\n", "\n"),
        CONTENT + "{{- '<|endoftext|>' }}",
        ("<|endoftext|>",),
        thinks=False,
        turn_end="<|endoftext|>",
    ),
    "aya": Family(
        (),
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        CONTENT,
        COHERE_TOKENS[:4],
        thinks=False,
    ),
    "nemotron": Family(
        ("think", "nemotron"),
        *("<SPECIAL_11>User\n", "<SPECIAL_11>Assistant\n", "\n<SPECIAL_12>\n\n"),
        thought("<think>\\n\\n", "</think>\\n\\n") + CONTENT + listed("<TOOLCALL>[", "]</TOOLCALL>", json_call()),
        ("<SPECIAL_11>", "<SPECIAL_12>"),
        "<think>\n\n",
    ),
    "deepseek-r1": Family(
        ("think", "deepseek"),
        *("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        thought("<think>\\n", "\\n</think>\\n\\n") + CONTENT + DEEPSEEK,
        ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        "<think>\n",
    ),
    "gpt-oss": Family(
        ("harmony",),
        *("<|start|>user<|message|>", "<|start|>assistant", ""),
        HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
        turn_end="<|return|>",
    ),
    "minimax-m2": Family(
        ("think", "minimax"),
        *("]~b]user\n", "]~b]ai\n", "[e~[\n"),
        thought() + CONTENT + MINIMAX_TAGS,
        ("]~b]", "[e~["),
        "<think>\n",
    ),
    "kimi": Family(
        ("think", "kimi"),
        *("<|im_user|>user<|im_middle|>", "<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
        thought("<think>", "</think>") + CONTENT + KIMI,
        (
            *("<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", "<|tool_calls_section_begin|>"),
            *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    "lfm2.5": Family(
        ("think", "lfm2"),
        *CHATML,
        thought("<think>", "</think>", "thinking")
        + CONTENT
        + listed("<|tool_call_start|>[", "]<|tool_call_end|>", PYTHON_CALL),
        (*CHATML_TOKENS, "<|tool_call_start|>", "<|tool_call_end|>"),
    ),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the family's tokens and template, and no end of a text."""
    family = FAMILIES[name]
    words = [word for word in ("<think>", "</think>", "<tool_call>", "</tool_call>") if word in family.template]
    backend = trained(BPE(), pre_tokenizers.ByteLevel.alphabet(), family.special, words)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=family.template)


def turn_end_of(name: str) -> str:
    """The token that ends a turn of the family."""
    return FAMILIES[name].turn_end or FAMILIES[name].end.strip()
