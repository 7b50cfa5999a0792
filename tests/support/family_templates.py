"""Chat templates shaped like those of the big families, written for these tests, with what each writes for an answer by hand.

A template is jinja; `answer` says in plain Python what the model itself must write after the prompt, end token included.
`left_out` names, per conversation of `CONVERSATIONS`, the parts that the template does not write; `REFUSED` if it raises.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tiny_tokenizer import CORPUS

Message = dict[str, Any]
REFUSED = "refused"


# ---------------------------------------------------------------- conversations


def _says(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _call(name: str, arguments: dict[str, Any], number: int = 1) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name"}, "n": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
ASKED = _says("user", "What is the weather in Paris?")
CALLED = {"role": "assistant", "content": "", "tool_calls": [_call("get_weather", {"city": "Paris", "n": 3})]}
RESULT = {"role": "tool", "content": "sunny", "name": "get_weather", "tool_call_id": "call00001"}
THOUGHT = {"role": "assistant", "content": "It is two.", "reasoning_content": "One and one."}

CONVERSATIONS: dict[str, list[Message]] = {
    "one turn": [_says("user", "What is one?"), _says("assistant", "A number.")],
    "system": [_says("system", "Be brief."), _says("user", "What is one?"), _says("assistant", "A number.")],
    "developer": [_says("developer", "Be kind."), _says("user", "What is one?"), _says("assistant", "A number.")],
    "short answers": [
        m for a in ("s", "user", ":", "assistant", "1", "<b>") for m in (_says("user", "And?"), _says("assistant", a))
    ],
    "several turns": [
        _says("system", "Be brief."), _says("user", "one?"), _says("assistant", "The quick brown fox\n\njumps."),
        _says("user", "And two?"), _says("assistant", "Paris, the capital of France."), _says("user", "x"),
        _says("assistant", "Yes"),
    ],
    "thought": [_says("user", "One and one?"), THOUGHT],
    "thoughts": [
        _says("user", "One and one?"), THOUGHT, _says("user", "Sure?"),
        {"role": "assistant", "content": "Yes.", "reasoning_content": "I am."},
    ],
    "tools": [ASKED, CALLED, RESULT, _says("assistant", "It is sunny.")],
    "everything": [
        _says("system", "Be brief."), ASKED, {**CALLED, "reasoning_content": "I must look."}, RESULT,
        _says("assistant", "It is sunny."), _says("user", "And there?"),
        {"role": "assistant", "content": "No idea.", "reasoning_content": "Where?"},
    ],
}  # fmt: skip


def tools_of(name: str) -> list[dict[str, Any]] | None:
    return TOOLS if name in ("tools", "everything") else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parts(message: Message) -> tuple[str, str, list[dict[str, Any]]]:
    """Content, thought and called functions."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message.get("content") or "", message.get("reasoning_content") or "", calls


# ---------------------------------------------------------------- families


@dataclass(frozen=True)
class FamilyTemplate:
    template: str
    answer: Callable[[Message], str]
    special: tuple[str, ...]
    left_out: dict[str, Any] = field(default_factory=dict)
    eos: str = ""
    samples: dict[str, int] = field(default_factory=dict)  # texts of a conversation, where not one


NO_THOUGHTS = {"thought": {"thoughts"}, "thoughts": {"thoughts"}}

LLAMA3 = FamilyTemplate(
    "{{- bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}"
    "{%- elif m.tool_calls %}{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}"
    "{%- endif %}"
    '{%- set f = m.tool_calls[0].function %}{{- \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + f.name '
    "+ '\", \"parameters\": ' + f.arguments | tojson + '}<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{%- if tools and m.role == 'user' and loop.index0 < 2 %}{{- 'You have functions:\n' }}"
    "{%- for t in tools %}{{- t | tojson(indent=4) + '\n\n' }}{%- endfor %}{%- endif %}"
    "{{- m.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}",
    lambda m: (
        (
            f'{{"name": "{f[0]["name"]}", "parameters": {_json(f[0]["arguments"])}}}'
            if (f := _parts(m)[2])
            else _parts(m)[0]
        )
        + "<|eot_id|>"
    ),
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    {**NO_THOUGHTS, "everything": {"thoughts"}},
    eos="<|eot_id|>",
)

MISTRAL = FamilyTemplate(
    "{%- set last = namespace(user=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set last.user = loop.index0 %}"
    "{%- endif %}{%- endfor %}{{- bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- if tools and loop.index0 == last.user %}"
    "{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}"
    "{%- endif %}{{- '[INST] ' }}{%- if loop.index0 == last.user and messages[0].role == 'system' %}"
    "{{- messages[0].content + '\n\n' }}"
    "{%- endif %}{{- m.content + '[/INST]' }}"
    "{%- elif m.role == 'assistant' and m.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}"
    "{%- if c.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}"
    '{{- \'{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson }}'
    "{{- ', \"id\": \"' + c.id + '\"}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' + eos_token }}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] {\"content\": ' + m.content | tojson + '}[/TOOL_RESULTS]' }}"
    "{%- elif not (loop.first and m.role == 'system') %}{{- raise_exception('no such role') }}{%- endif %}"
    "{%- endfor %}",
    lambda m: (
        "[TOOL_CALLS] ["
        + ", ".join(
            f'{{"name": "{c["function"]["name"]}", "arguments": {_json(c["function"]["arguments"])}, "id": "{c["id"]}"}}'
            for c in m["tool_calls"]
        )
        + "]</s>"
        if m.get("tool_calls")
        else f" {m['content']}</s>"
    ),
    (
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    {**NO_THOUGHTS, "developer": REFUSED, "everything": {"thoughts"}},
    eos="</s>",
    samples={"several turns": 3},
)

CHATML_END = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
QWEN_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}"
    "{{- messages[0].content + '\n\n' }}{%- endif %}"
    "{{- '# Tools\n<tools>' }}{%- for t in tools %}{{- '\n' + t | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}"
)
QWEN_CALLS = (
    "{%- for c in m.tool_calls or [] %}{%- if not loop.first or text %}{{- '\n' }}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson '
    "+ '}\n</tool_call>' }}"
    "{%- endfor %}"
)
QWEN_RESULT = (
    "{%- elif m.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}"
    "{%- endfor %}"
)


def _qwen_calls(functions: list[dict[str, Any]], text: str) -> str:
    calls = [
        f'<tool_call>\n{{"name": "{f["name"]}", "arguments": {_json(f["arguments"])}}}\n</tool_call>' for f in functions
    ]
    return "\n".join([text] * bool(text) + calls)


QWEN25 = FamilyTemplate(
    QWEN_TOOLS.replace("{%- elif messages[0].role == 'system' %}", "{%- elif messages[0].role == 'system' %}", 1)
    + "{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{%- set text = m.content %}{{- '<|im_start|>assistant\n' + (m.content or '') }}"
    + QWEN_CALLS
    + "{{- '<|im_end|>\n' }}"
    + QWEN_RESULT
    + CHATML_END,
    lambda m: _qwen_calls(_parts(m)[2], _parts(m)[0]) + "<|im_end|>",
    ("<|im_start|>", "<|im_end|>"),
    {**NO_THOUGHTS, "developer": {"developer messages"}, "everything": {"thoughts"}},
    eos="<|im_end|>",
)

QWEN3 = FamilyTemplate(
    QWEN_TOOLS + "{%- set ns = namespace(last=messages | length) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role in ('user', 'developer') or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{%- set text = m.content or '' %}{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "{{- '<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' }}{%- endif %}{{- text }}"
    + QWEN_CALLS
    + "{{- '<|im_end|>\n' }}"
    + QWEN_RESULT
    + CHATML_END,
    lambda m: f"<think>\n{_parts(m)[1]}\n</think>\n\n{_qwen_calls(_parts(m)[2], _parts(m)[0])}<|im_end|>",
    ("<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
    samples={"several turns": 3, "short answers": 6, "thoughts": 2, "everything": 2, "tools": 2},
)

QWQ = FamilyTemplate(
    QWEN_TOOLS + "{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{%- set text = (m.content or '').split('</think>')[-1].lstrip('\n') %}"
    "{{- '<|im_start|>assistant\n' + text }}"
    + QWEN_CALLS
    + "{{- '<|im_end|>\n' }}"
    + QWEN_RESULT
    + CHATML_END.replace("assistant\n", "assistant\n<think>\n"),
    lambda m: f"{_parts(m)[1]}\n</think>\n\n{_qwen_calls(_parts(m)[2], _parts(m)[0])}<|im_end|>",
    ("<|im_start|>", "<|im_end|>"),
    {"developer": {"developer messages"}},
    eos="<|im_end|>",
    samples={"several turns": 3, "short answers": 6, "thoughts": 2, "everything": 3, "tools": 2},
)
"""The generation prompt opens a thought, and rendered turns never have one."""

R1 = FamilyTemplate(
    "{%- set ns = namespace(system='', after_tool=false) %}{%- for m in messages %}{%- if m.role == 'system' %}"
    "{%- set ns.system = m.content %}{%- endif %}{%- endfor %}{{- bos_token + ns.system }}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.after_tool = false %}{{- '<|User|>' + m.content }}"
    "{%- elif m.role == 'assistant' and m.tool_calls %}{{- '<|Assistant|>' + (m.content or '') + '<|calls_begin|>' }}"
    "{%- for c in m.tool_calls %}"
    "{{- '<|call_begin|>function<|sep|>' + c.function.name + '\n```json\n' + c.function.arguments "
    "+ '\n```<|call_end|>' }}{%- endfor %}{{- '<|calls_end|><|end_of_sentence|>' }}"
    "{%- elif m.role == 'assistant' %}{%- if not ns.after_tool %}{{- '<|Assistant|>' }}{%- endif %}"
    "{{- (m.content.split('</think>')[-1]) + '<|end_of_sentence|>' }}{%- set ns.after_tool = false %}"
    "{%- elif m.role == 'tool' %}{%- set ns.after_tool = true %}"
    "{{- '<|output_begin|>' + m.content + '<|output_end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and not ns.after_tool %}{{- '<|Assistant|><think>\n' }}{%- endif %}",
    lambda m: f"{_parts(m)[1]}\n</think>\n\n{m['content']}<|end_of_sentence|>",
    (
        "<|begin_of_sentence|>", "<|User|>", "<|Assistant|>", "<|end_of_sentence|>", "<|calls_begin|>", "<|call_begin|>",
        "<|sep|>", "<|call_end|>", "<|calls_end|>", "<|output_begin|>", "<|output_end|>",
    ),
    {"developer": {"developer messages"}, "tools": {"tool schemas"}, "everything": {"tool schemas"}},
    eos="<|end_of_sentence|>",
    samples={"several turns": 3, "short answers": 6, "thoughts": 2},
)  # fmt: skip
"""Takes arguments as text, opens a thought in the generation prompt, and never writes one."""

GEMMA3 = FamilyTemplate(
    "{{- bos_token }}{%- set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{%- set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}"
    "{%- for m in loop_messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{{- m.content | trim + '<end_of_turn>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}",
    lambda m: f"{m['content']}<end_of_turn>",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    {**NO_THOUGHTS, "developer": REFUSED, "tools": REFUSED, "everything": REFUSED},
    eos="<eos>",
)

PHI4 = FamilyTemplate(
    "{%- for m in messages %}{%- if m.role == 'system' %}"
    "{{- '<|im_start|>system<|im_sep|>' + m.content + '<|im_end|>' }}"
    "{%- elif m.role == 'user' %}{{- '<|im_start|>user<|im_sep|>' + m.content + '<|im_end|>' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant<|im_sep|>' + m.content + '<|im_end|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{%- endif %}",
    lambda m: f"{m['content']}<|im_end|>",
    ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    {**NO_THOUGHTS, "developer": {"developer messages"}, "tools": {"tool calls"}, "everything": {"tool calls"}},
    eos="<|im_end|>",
)

GLM45 = FamilyTemplate(
    "{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\n# Tools\n<tools>\n' }}{%- for t in tools %}"
    "{{- t | tojson + '\n' }}{%- endfor %}"
    "{{- '</tools>' }}{%- endif %}{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role in ('system', 'user') %}{{- '<|' + m.role + '|>\n' + m.content }}"
    "{%- elif m.role == 'assistant' %}{{- '<|assistant|>\n' }}"
    "{%- if loop.index0 > ns.last and m.reasoning_content %}"
    "{{- '<think>' + m.reasoning_content.strip() + '</think>\n' }}"
    "{%- else %}{{- '<think></think>\n' }}{%- endif %}{{- (m.content or '').strip() }}"
    "{%- for c in m.tool_calls or [] %}{{- '\n<tool_call>' + c.function.name + '\n' }}"
    "{%- for k, v in c.function.arguments.items() %}"
    "{{- '<arg_key>' + k + '</arg_key>\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>\n' }}"
    "{%- endfor %}"
    "{{- '</tool_call>' }}{%- endfor %}"
    "{%- elif m.role == 'tool' %}{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}",
    lambda m: (
        f"<think>{_parts(m)[1]}</think>\n{m['content']}"
        + "".join(
            f"\n<tool_call>{f['name']}\n"
            + "".join(
                f"<arg_key>{k}</arg_key>\n<arg_value>{v if isinstance(v, str) else _json(v)}</arg_value>\n"
                for k, v in f["arguments"].items()
            )
            + "</tool_call>"
            for f in _parts(m)[2]
        )
        + ("<|observation|>" if _parts(m)[2] else "<|user|>")
    ),
    ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
    {"developer": {"developer messages"}},
    eos="<|endoftext|>",
    samples={"thoughts": 2, "everything": 2},
)
"""Ends no turn: the token of the next one does."""

GPT_OSS = FamilyTemplate(
    "{{- '<|start|>system<|message|>You are a model.\nReasoning: medium<|end|>' }}"
    "{%- set dev = messages[0].content if messages[0].role in ('developer', 'system') else '' %}"
    "{%- if dev or tools %}{{- '<|start|>developer<|message|>' }}{%- if dev %}"
    "{{- '# Instructions\n\n' + dev + '\n\n' }}{%- endif %}"
    "{%- if tools %}{{- '# Tools\n\nnamespace functions {\n\n' }}{%- for t in tools %}"
    "{{- '// ' + t.function.description + '\ntype ' "
    "+ t.function.name + ' = (_: {\n' }}{%- for k, p in t.function.parameters.properties.items() %}"
    "{%- if p.description %}{{- '// ' + p.description + '\n' }}{%- endif %}"
    "{{- k + ('' if k in t.function.parameters.required else '?') + ': ' "
    "+ ('number' if p.type == 'integer' else p.type) + ',\n' }}"
    "{%- endfor %}{{- '}) => any;\n\n' }}{%- endfor %}{{- '}' }}{%- endif %}{{- '<|end|>' }}{%- endif %}"
    "{%- set ns = namespace(last=-1, called='') %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' and not m.tool_calls %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'assistant' and m.tool_calls %}{%- set f = m.tool_calls[0].function %}"
    "{%- set ns.called = f.name %}"
    "{%- if m.reasoning_content and loop.index0 > ns.last %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' "
    "+ f.arguments | tojson + '<|call|>' }}"
    "{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}"
    "{%- if m.reasoning_content %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson "
    "+ '<|end|>' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}",
    lambda m: (
        (f"<|channel|>analysis<|message|>{_parts(m)[1]}<|end|><|start|>assistant" if _parts(m)[1] else "")
        + (
            f" to=functions.{f[0]['name']}<|channel|>commentary json<|message|>{_json(f[0]['arguments'])}<|call|>"
            if (f := _parts(m)[2])
            else f"<|channel|>final<|message|>{m['content']}<|return|>"
        )
    ),
    ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
    eos="<|return|>",
    samples={"several turns": 3, "short answers": 6, "thoughts": 2, "everything": 2},
)
"""Drops the thoughts before a tool call once there is an answer, which changes the prompt of that answer."""

COMMAND = FamilyTemplate(
    "{{- bos_token }}{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}{%- if tools %}"
    "{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># Tools\n' + tools | tojson + '<|END_OF_TURN_TOKEN|>' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}"
    "{%- if m.reasoning_content and loop.index0 > ns.last %}"
    "{{- '<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' }}{%- endif %}"
    "{%- if m.tool_calls %}{{- '<|START_ACTION|>[' }}{%- for c in m.tool_calls %}"
    "{{- '{\"tool_name\": \"' + c.function.name "
    "+ '\", \"parameters\": ' + c.function.arguments | tojson + '}' }}{%- if not loop.last %}{{- ', ' }}"
    "{%- endif %}{%- endfor %}{{- ']<|END_ACTION|>' }}"
    "{%- else %}{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{%- endif %}{{- '<|END_OF_TURN_TOKEN|>' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>' + m.content | tojson "
    "+ '<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>' }}"
    "{%- else %}"
    "{{- '<|START_OF_TURN_TOKEN|>' + ('<|USER_TOKEN|>' if m.role == 'user' else '<|SYSTEM_TOKEN|>') + m.content "
    "+ '<|END_OF_TURN_TOKEN|>' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}"
    "{%- endif %}",
    lambda m: (
        (f"<|START_THINKING|>{_parts(m)[1]}<|END_THINKING|>" if _parts(m)[1] else "")
        + (
            "<|START_ACTION|>["
            + ", ".join(f'{{"tool_name": "{f["name"]}", "parameters": {_json(f["arguments"])}}}' for f in _parts(m)[2])
            + "]<|END_ACTION|>"
            if _parts(m)[2]
            else f"<|START_RESPONSE|>{m['content']}<|END_RESPONSE|>"
        )
        + "<|END_OF_TURN_TOKEN|>"
    ),
    (
        "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>",
        "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>",
    ),
    eos="<|END_OF_TURN_TOKEN|>",
    samples={"thoughts": 2, "everything": 2},
)  # fmt: skip

SMOLLM3 = FamilyTemplate(
    "{{- '<|im_start|>system\n## Metadata\n\n' }}{%- if messages[0].role == 'system' %}"
    "{{- messages[0].content + '\n' }}{%- endif %}"
    "{%- if tools %}{{- '### Tools\n<tools>\n' }}{%- for t in tools %}{{- t | tojson + '\n' }}{%- endfor %}"
    "{{- '</tools>\n' }}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}{% generation %}"
    "{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n' }}{%- endif %}"
    "{{- m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + c.function | tojson + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- elif m.role == 'tool' %}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    + CHATML_END,
    lambda m: (
        (f"<think>\n{_parts(m)[1]}\n</think>\n" if _parts(m)[1] else "")
        + _parts(m)[0]
        + "".join(f"<tool_call>{_json(f)}</tool_call>" for f in _parts(m)[2])
        + "<|im_end|>"
    ),
    ("<|im_start|>", "<|im_end|>"),
    {"developer": {"developer messages"}},
    eos="<|im_end|>",
)
"""Marks answers with generation blocks."""

FAMILIES = {
    "Llama 3": LLAMA3, "Mistral": MISTRAL, "Qwen 2.5": QWEN25, "Qwen 3": QWEN3, "QwQ": QWQ, "DeepSeek R1": R1, "Gemma 3": GEMMA3,
    "Phi 4": PHI4, "GLM 4.5": GLM45, "gpt-oss": GPT_OSS, "Command": COMMAND, "SmolLM3": SMOLLM3,
}  # fmt: skip


# ---------------------------------------------------------------- templates in installed packages


def installed_templates() -> dict[str, str]:
    """The chat templates in the source of transformers, by the name of the model's package. Hub files are not installed."""
    found = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/*.py")):
        source = file.read_bytes()
        if b"{%" in source and b"messages" in source:
            strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
            templates = [one for one in strings if isinstance(one, str) and "{%" in one and "in messages" in one]
            if templates:
                found[file.parent.name] = max(templates, key=len)
    return found


def _llama4_answer(message: Message) -> str:
    content, _, calls = _parts(message)
    if not calls:
        return f"{content}<|eot|>"
    written = [f'{{"name": "{f["name"]}", "parameters": {_json(f["arguments"])}}}' for f in calls]
    return f"<|python_start|>{content}<|python_end|>{''.join(written)}<|eot|>"


def family_of(name: str) -> FamilyTemplate:
    return FAMILIES.get(name) or installed_families()[name]


@functools.cache
def installed_families() -> dict[str, FamilyTemplate]:
    """The same table for `installed_templates`."""
    templates = installed_templates()
    no_tools = {"tools": {"tool calls"}, "everything": {"tool calls"}}
    return {
        "llama4": FamilyTemplate(
            templates["llama4"], _llama4_answer,
            ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|python_start|>", "<|python_end|>"),
            {**NO_THOUGHTS, "everything": {"thoughts"}}, eos="<|eot|>",
        ),
        "smolvlm": FamilyTemplate(
            templates["smolvlm"], lambda m: f" {m['content']}<end_of_utterance>", ("<|im_start|>", "<end_of_utterance>"),
            {**NO_THOUGHTS, **no_tools}, eos="<end_of_utterance>",
        ),
        "qwen2_audio": FamilyTemplate(
            templates["qwen2_audio"], lambda m: f"{m['content']}<|im_end|>", ("<|im_start|>", "<|im_end|>", "<|AUDIO|>"),
            {**NO_THOUGHTS, **no_tools}, eos="<|im_end|>",
        ),
    }  # fmt: skip


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the family's special tokens, called by the family's name."""
    family = family_of(name)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = list(dict.fromkeys([*family.special, family.eos]))
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=family.eos,
        extra_special_tokens=[token for token in special if token not in (special[0], family.eos)],
    )
    made.chat_template = family.template
    made.name_or_path = name
    return made
