"""How models write thoughts and tool calls: one table, whose rows are selected by the content of a chat template.

The markers are those that the template itself writes or shows to the model, so the model's name does not matter. A
template that matches no row gets `NO_FORM`. `server/answer_parsers.py` has the few notations read for any model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

# The parser of the text between the markers of a call:
# json       an object, or a list of them, with name and arguments
# named      a name between marks, and an object of arguments: `AnswerForm.items` shows how; with a `quote` its keys are
#            bare, and its texts stand between two of these marks
# keyed      a list of objects, each with the name as its only key and the arguments as its value
# tags       <function=name> or <invoke name="name"> with a <parameter> per argument
# arguments  a name, then <arg_key> and <arg_value> per argument; or several of these, each within <tool_call>
# pythonic   calls as in Python: f(x=1), in a list or on lines; or JSON
Body = Literal["json", "named", "keyed", "tags", "arguments", "pythonic"]

NAME = "{name}"  # Place of a tool's name in a mark or an item.


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Markers of thoughts, answers and calls. A row may have only thoughts or only calls; another row has the rest.

    A template of this form contains all of `signs`. A thought begins with one of `thinks` and ends with one of
    `thought_ends`; if the form `rethinks`, further thoughts may follow other text. With `calls_in_thoughts` a call also
    ends a thought. `hidden` markers are not part of the answer's text.

    `answer_begin` starts an answer without a thought; models also expect it before constrained JSON.

    A call begins with one of `calls` and ends with `calls_end` ("": at the end of its body). A marker with a tool's
    name is part of the body. `items` show how a named call is written, the likeliest first. `turn_ends` are tokens that
    end a turn although the template does not write them after an answer.
    """

    models: str = ""
    signs: tuple[str, ...] = ()
    thinks: tuple[str, ...] = ()
    thought_ends: tuple[str, ...] = ()
    rethinks: bool = False
    calls_in_thoughts: bool = False
    hidden: tuple[str, ...] = ()
    answer_begin: str = ""
    calls: tuple[str, ...] = ()
    calls_end: str = ""
    body: Body = "json"
    items: tuple[str, ...] = ()
    quote: str = ""
    turn_ends: tuple[str, ...] = ()

    def marks(self, with_calls: bool = True) -> str:
        """Return all markers in one text; completions must keep special tokens that occur in it."""
        calls = (*self.calls, self.calls_end, *self.items, self.quote) if with_calls else ()
        return "\n".join((*self.thinks, *self.thought_ends, *self.hidden, *calls))


NO_FORM = AnswerForm()

_THINK = AnswerForm(thinks=("<think>",), thought_ends=("</think>",))
_ANSWER = replace(_THINK, hidden=("<answer>", "</answer>"))
_RESPONSE = replace(_THINK, hidden=("<response>", "</response>"))
_TOOL_CALL = AnswerForm(calls=("<tool_call>",), calls_end="</tool_call>")


def _hunyuan_3(models: str, signs: tuple[str, ...], suffix: str = "") -> AnswerForm:
    """Return the form of Hunyuan 3; `suffix` ends all markers of a checkpoint."""
    key, value = (f"<arg_{part}{suffix}>{{{part}}}</arg_{part}{suffix}>" for part in ("key", "value"))
    return AnswerForm(
        models=models,
        signs=signs,
        thinks=(f"<think{suffix}>",),
        thought_ends=(f"</think{suffix}>",),
        calls=(f"<tool_calls{suffix}>",),
        calls_end=f"</tool_calls{suffix}>",
        body="arguments",
        items=(f"<tool_call{suffix}>{{name}}<tool_sep{suffix}>{key}{value}</tool_call{suffix}>",),
    )


# Among the rows whose signs a template contains, the first with thoughts and the first with calls apply.
FORMS: Mapping[str, AnswerForm] = {
    "harmony": AnswerForm(
        models="gpt-oss",
        signs=("<|channel|>analysis<|message|>",),
        thinks=("<|channel|>analysis<|message|>",),
        thought_ends=("<|end|>",),
        rethinks=True,
        hidden=(
            *("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
            *("<|end|>", "<|return|>", "<|call|>"),
        ),
        answer_begin="<|channel|>final<|message|>",
        calls=("<|channel|>commentary to=", "<|channel|>analysis to=", " to=functions."),
        body="named",
        items=(
            "functions.{name} <|constrain|> json <|message|>{arguments}",
            "functions.{name} json <|message|>{arguments}",
            "functions.{name} <|message|>{arguments}",
            "{name} <|channel|>commentary <|constrain|> json <|message|>{arguments}",
            "{name} <|channel|>commentary json <|message|>{arguments}",
            "{name} <|channel|>analysis json <|message|>{arguments}",
            "{name} <|constrain|> json <|message|>{arguments}",
            "{name} json <|message|>{arguments}",
            "{name} <|message|>{arguments}",
        ),
        turn_ends=("<|return|>", "<|call|>"),
    ),
    "seed": AnswerForm(
        models="Seed-OSS",
        signs=("<seed:tool_call>", "<seed:think>"),
        thinks=("<seed:think>", "<seed:think><seed:cot_budget_reflect>"),
        thought_ends=("</seed:think>",),
        calls=("<seed:tool_call>",),
        calls_end="</seed:tool_call>",
        body="tags",
    ),
    "cohere": AnswerForm(
        models="Command R7B, Command A, Aya (cohere2)",
        signs=("<|START_ACTION|>",),
        thinks=("<|START_THINKING|>",),
        thought_ends=("<|END_THINKING|>",),
        hidden=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        calls=("<|START_ACTION|>",),
        calls_end="<|END_ACTION|>",
    ),
    "apertus": AnswerForm(
        models="Apertus",
        signs=("<|tools_prefix|>", "<|inner_prefix|>"),
        thinks=("<|inner_prefix|>",),
        thought_ends=("<|inner_suffix|>",),
        rethinks=True,
        calls_in_thoughts=True,
        hidden=("<|inner_suffix|>",),  # The answer after a call's result may begin with it.
        calls=("<|tools_prefix|>",),
        calls_end="<|tools_suffix|>",
        body="keyed",
    ),
    "gemma 4": AnswerForm(
        models="Gemma 4",
        signs=("<|channel>", "<|tool_call>call:"),
        thinks=("<|channel>thought",),
        thought_ends=("<channel|>",),
        calls=("<|tool_call>",),
        calls_end="<tool_call|>",
        body="named",
        items=("call:{name}{arguments}",),
        quote='<|"|>',
        turn_ends=("<|tool_response>",),
    ),
    "hunyuan 3": _hunyuan_3("Hunyuan 3", ("<tool_sep{}>", ":opensource"), ":opensource"),
    "hunyuan 3 preview": _hunyuan_3("Hunyuan 3 preview", ("<tool_sep>",)),
    "solar": AnswerForm(
        models="Solar Open",
        signs=("<|think|>", "<|tool_call:begin|>"),
        thinks=("<|think|>",),
        thought_ends=("<|end|>",),
        rethinks=True,
        hidden=("<|begin|>assistant", "<|content|>", "<|end|>", "<|tool_calls|>", "<|calls|>", "<|flush|>"),
        calls=("<|tool_call:begin|>",),
        body="named",
        items=("{id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>",),
        turn_ends=("<|calls|>", "<|flush|>"),
    ),
    "hyperclova x": AnswerForm(
        models="HyperCLOVA X SEED Think 14B",
        signs=("-> tool/function_call",),
        thinks=("/think",),
        thought_ends=("<|im_end|>",),
        hidden=("<|im_end|>", "<|im_start|>assistant"),
        calls=(" -> tool/function_call",),
        turn_ends=("<|endofturn|>", "<|stop|>"),
    ),
    # --- thoughts
    "mistral thoughts": AnswerForm(
        models="Magistral, Ministral 3",
        signs=("[THINK]",),
        thinks=("[THINK]",),
        thought_ends=("[/THINK]",),
    ),
    "granite thoughts": AnswerForm(
        models="Granite 3.2",
        signs=("Here is my thought process:", "Here is my response:"),
        thinks=("Here is my thought process:", "Here's my thought process:"),
        thought_ends=("Here is my response:", "Here's my response:"),
    ),
    "think, answer": replace(_ANSWER, models="Hunyuan", signs=("</think>", "<answer>")),
    "think, unsaid answer": replace(
        _ANSWER, models="Hunyuan A13B", signs=("</think>", '<tool_calls>[{"name": "func_name1"')
    ),
    "think, response": replace(_RESPONSE, models="ERNIE 4.5", signs=("think_mode", "<response>")),
    "think, told response": replace(_RESPONSE, models="Granite 3.3", signs=("</think>", "<response></response>")),
    "think": replace(
        _THINK,
        models=(
            "Qwen3, Qwen3.5, QwQ, DeepSeek-R1 and its distills, SmolLM3, EXAONE 4, GLM-4.5, OLMo 3, Nemotron, Kimi,"
            " MiniMax-M2, LFM2.5, Falcon-H1R, Phi-4-reasoning, HyperCLOVA X SEED Think 32B"
        ),
        signs=("</think>",),
    ),
    "think, unclosed": replace(_THINK, models="templates that only begin a thought", signs=("<think>",)),
    # --- calls
    "minimax": AnswerForm(
        models="MiniMax-M2",
        signs=("<minimax:tool_call>",),
        calls=("<minimax:tool_call>",),
        calls_end="</minimax:tool_call>",
        body="tags",
    ),
    "kimi": AnswerForm(
        models="Kimi K2",
        signs=("<|tool_calls_section_begin|>",),
        calls=("<|tool_calls_section_begin|>",),
        calls_end="<|tool_calls_section_end|>",
        body="named",
        items=(
            "<|tool_call_begin|>functions.{name}:{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
            "<|tool_call_begin|>{name}:{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
            "<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        ),
    ),
    "deepseek": AnswerForm(
        models="DeepSeek-R1 and its distills, DeepSeek-V3, V3.1",
        signs=("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
        calls=("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
        calls_end="<\uff5ctool\u2581calls\u2581end\uff5c>",
        body="named",
        items=(
            "<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>{name}\n```json\n{arguments}\n```"
            "<\uff5ctool\u2581call\u2581end\uff5c>",
            "<\uff5ctool\u2581call\u2581begin\uff5c>{name}<\uff5ctool\u2581sep\uff5c>{arguments}"
            "<\uff5ctool\u2581call\u2581end\uff5c>",
        ),
    ),
    "lfm2": AnswerForm(
        models="LFM2, LFM2.5",
        signs=("<|tool_call_start|>",),
        calls=("<|tool_call_start|>",),
        calls_end="<|tool_call_end|>",
        body="pythonic",
    ),
    "olmo": AnswerForm(
        models="OLMo 3",
        signs=("<function_calls>",),
        calls=("<function_calls>",),
        calls_end="</function_calls>",
        body="pythonic",
    ),
    "nemotron": AnswerForm(
        models="Nemotron",
        signs=("<TOOLCALL>",),
        calls=("<TOOLCALL>",),
        calls_end="</TOOLCALL>",
    ),
    "function gemma": AnswerForm(
        models="FunctionGemma",
        signs=("<start_function_call>",),
        calls=("<start_function_call>",),
        calls_end="<end_function_call>",
        body="named",
        items=("call:{name}{arguments}",),
        quote="<escape>",
        turn_ends=("<start_function_response>",),
    ),
    "internlm": AnswerForm(
        models="InternLM 2.5, 3",
        signs=("<|action_start|>",),
        calls=("<|action_start|><|plugin|>",),
        calls_end="<|action_end|>",
    ),
    "hunyuan": AnswerForm(
        models="Hunyuan, Jamba, MiniMax-M1",
        signs=("<tool_calls>",),
        calls=("<tool_calls>",),
        calls_end="</tool_calls>",
    ),
    "mistral": AnswerForm(
        models="Mistral, Ministral, Mistral Small 3, Magistral",
        signs=("[TOOL_CALLS]",),
        calls=("[TOOL_CALLS]",),
        body="named",
        items=("{name}[CALL_ID]{id}[ARGS]{arguments}", "{name}[ARGS]{arguments}", "{name}{arguments}"),
    ),
    "command-r": AnswerForm(
        models="Command R, Command R+",
        signs=("Action:", "directly_answer"),
        calls=("Action: ```json", "Action:```json"),
        calls_end="```",
    ),
    "phi": AnswerForm(
        models="Phi-4-mini",
        signs=("<|tool|>", "<|/tool|>"),
        calls=("<|tool_call|>",),
        calls_end="<|/tool_call|>",
    ),
    "granite": AnswerForm(
        models="Granite 3",
        signs=("<|tool_call|>",),
        calls=("<|tool_call|>",),
    ),
    "function tags": replace(
        _TOOL_CALL,
        models="Qwen3-Coder, Qwen3.5, Nemotron 3",
        signs=("<tool_call>", "<function="),
        calls=("<tool_call>", "<function={name}>"),
        body="tags",
    ),
    "argument tags": replace(
        _TOOL_CALL,
        models="GLM-4.5, GLM-4.6, HyperCLOVA X SEED Think 32B",
        signs=("<tool_call>", "<arg_key>"),
        body="arguments",
        turn_ends=("<|user|>", "<|observation|>"),
    ),
    "glm": AnswerForm(
        models="GLM-4",
        signs=("[gMASK]", "<|observation|>"),
        calls=("{name}\n{",),
        body="named",
        items=("{name}\n{arguments}",),
        turn_ends=("<|user|>", "<|observation|>"),
    ),
    "tool_call": replace(
        _TOOL_CALL,
        models="Qwen2.5, Qwen3, Hermes, SmolLM3, Granite 4, Falcon-H1, EXAONE 4, ERNIE 4.5",
        signs=("<tool_call>",),
    ),
    "python list": AnswerForm(
        models="templates that ask for [f(x=1)], as for Llama 3.2, Llama 4 and Gemma 3",
        signs=("[func_name1(",),
        calls=("[{name}(",),
        body="pythonic",
    ),
    "llama 4": AnswerForm(
        models="Llama 4",
        signs=("<|header_start|>", "<|python_start|>"),
        hidden=("<|python_start|>", "<|python_end|>"),  # Around an answer's text; calls follow it without a mark.
        calls=('{"name": "{name}"', '{"type": "function", "name": "{name}"', "[{name}("),
        body="pythonic",
        turn_ends=("<|eot|>", "<|eom|>"),
    ),
    "llama": AnswerForm(
        models="Llama 3.1, Llama 3.2, Llama 3.3",
        signs=("<|eot_id|>", "<|python_tag|>"),
        calls=("<|python_tag|>",),
        turn_ends=("<|eot_id|>", "<|eom_id|>"),
    ),
}


@lru_cache(64)
def forms_of(template: str) -> tuple[str, ...]:
    """Return the names of a template's rows: one with thoughts, one with calls, or one with both."""
    rows = [name for name, form in FORMS.items() if all(sign in template for sign in form.signs)]
    thoughts = (name for name in rows if FORMS[name].thinks)
    calls = (name for name in rows if FORMS[name].calls)
    return tuple(dict.fromkeys(name for name in (next(thoughts, None), next(calls, None)) if name is not None))


@lru_cache(64)
def merged(names: Iterable[str]) -> AnswerForm:
    """Return the form that these rows of the table make together."""
    rows = [FORMS[name] for name in names]
    thoughts = next((form for form in rows if form.thinks), NO_FORM)
    calls = next((form for form in rows if form.calls), NO_FORM)
    return replace(
        calls,
        thinks=thoughts.thinks,
        thought_ends=thoughts.thought_ends,
        rethinks=thoughts.rethinks,
        calls_in_thoughts=thoughts.calls_in_thoughts,
        answer_begin=thoughts.answer_begin,
        hidden=tuple(dict.fromkeys((*thoughts.hidden, *calls.hidden))),
        turn_ends=tuple(dict.fromkeys((*thoughts.turn_ends, *calls.turn_ends))),
    )
