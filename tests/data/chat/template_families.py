"""Chat templates in the notation of many model families, written for these tests.

A row of the table says how a family frames each role, writes calls, thoughts and tools, and ends a turn; `template`
makes Jinja of it. The differences between real templates that matter to a loss mask are all there: what ends a turn,
what a generation prompt opens, where thoughts go, what is refused or left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tests.data.template_styles import Style

JSON_CALL = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
PARAMETERS_CALL = '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
TEXT = "{{ v if v is string else v | tojson }}"
FUNCTION_XML = "<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n" + TEXT
FUNCTION_XML += "\n</parameter>\n{% endfor %}</function>"
ARGUMENT_XML = "{{ c.name }}\n{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>" + TEXT
ARGUMENT_XML += "</arg_value>\n{% endfor %}"
INVOKE_XML = '<invoke name="{{ c.name }}">\n{% for k, v in c.arguments.items() %}<parameter name="{{ k }}">' + TEXT
INVOKE_XML += "</parameter>\n{% endfor %}</invoke>"
PYTHONIC = "{{ c.name }}({% for k, v in c.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}"
PYTHONIC += "{% endfor %})"


@dataclass(frozen=True)
class Family:
    """How a family writes a dialogue.

    Attributes:
        system, user, tool: the frame of each message around `@`; empty: left out; None: refused.
        assistant: what opens an answer; `end` closes it, or one that is only calls by `call_end`.
        calls: what stands before a message's calls, between two, and behind them.
        call: one call, `c`; None where the template leaves calls out.
        thoughts: around `@`; "last" and "tail" write them behind the last question alone; None: left out.
        prompt: what the generation prompt opens besides.
        bos: at the very beginning.
        tools: the description of the tools stands in front.
        alternating: other orders than question and answer are refused.
    """

    assistant: str
    end: str
    user: str
    system: str | None = ""
    tool: str | None = ""
    calls: tuple[str, str, str] = ("", "", "")
    call: str | None = None
    call_end: str | None = None
    thoughts: str | None = None
    which: str = "all"
    prompt: str = ""
    bos: str = ""
    tools: str = ""
    alternating: bool = False
    words: tuple[str, ...] = ()

    def style(self) -> Style:
        """The template, and the tokens that it writes."""
        template = self.template()
        shapes = r"<\|[^|<>]+\|>|<｜[^｜]+｜>|<\w+_of_turn>|\[/?[A-Z_]+\]"
        shapes += r"|<\|\w+>|<\w+\|>|<\w+_\w+>|\]~[!b]b\[|\[e~\[|</s>|</?\w+:\w+>"
        special = tuple(dict.fromkeys(re.findall(shapes, template)))
        return Style(template, special, self.words)

    def template(self) -> str:
        """Jinja."""

        def framed(frame: str | None, words: str) -> str:
            return "{{ raise_exception('no such role') }}" if frame is None else frame.replace("@", words)

        thought = ""
        if self.thoughts is not None:
            when = {"all": "m.reasoning_content", "last": "m.reasoning_content and loop.index0 > ns.last"}
            when["tail"] = "loop.index0 > ns.last"  # an empty thought, too
            inner = framed(self.thoughts, "{{ m.reasoning_content or '' }}")
            thought = "{% if " + when[self.which] + " %}" + inner + "{% endif %}"
        calls = ""
        if self.call is not None:
            before, between, behind = self.calls
            calls = "{% if m.tool_calls %}" + before + "{% for t in m.tool_calls %}{% set c = t.function %}"
            calls += "{% if not loop.first %}" + between + "{% endif %}" + self.call + "{% endfor %}" + behind
            calls += (self.end if self.call_end is None else self.call_end) + "{% else %}" + self.end + "{% endif %}"
        alternate = "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
        alternate += "{% endif %}{% set ns.n = ns.n + 1 %}"
        return "".join(
            [
                "{% set ns = namespace(last=-1, n=0) %}{% for m in messages %}{% if m.role == 'user' %}",
                "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}",
                self.bos,
                "{% if tools %}" + self.tools.replace("@", "{% for f in tools %}{{ f | tojson }}\n{% endfor %}"),
                "{% endif %}{% for m in messages %}",
                alternate if self.alternating else "",
                "{% if m.role == 'system' %}" + framed(self.system, "{{ m.content }}"),
                "{% elif m.role == 'user' %}" + framed(self.user, "{{ m.content }}"),
                "{% elif m.role == 'tool' %}" + framed(self.tool, "{{ m.content }}"),
                "{% else %}" + self.assistant + thought + "{{ m.content }}" + (calls or self.end),
                "{% endif %}{% endfor %}{% if add_generation_prompt %}" + self.assistant + self.prompt + "{% endif %}",
            ]
        )


def chatml(start: str = "<|im_start|>", end: str = "<|im_end|>", line: str = "\n", **more: Any) -> Family:
    frames: dict[str, Any] = {role: f"{start}{role}{line}@{end}\n" for role in ("system", "user")}
    frames["tool"] = f"{start}user{line}<tool_response>\n@\n</tool_response>{end}\n"
    fields = {
        "assistant": f"{start}assistant{line}",
        "end": f"{end}\n",
        "tools": f"{start}system{line}Tools:\n@{end}\n",
    }
    return Family(**frames | fields | more)


def headers(open_: str, close: str, end: str, **more: Any) -> Family:
    frames: dict[str, Any] = {role: f"{open_}{role}{close}@{end}" for role in ("system", "user", "tool")}
    fields: dict[str, Any] = {
        "assistant": f"{open_}assistant{close}",
        "end": end,
        "tools": f"{open_}system{close}Tools: @{end}",
    }
    return Family(**frames | fields | more)


TOOL_CALL: dict[str, Any] = {
    "calls": ("\n<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "call": JSON_CALL,
}
TAGS = ("<tool_call>", "</tool_call>")
THINK = ("<think>", "</think>")
BLOCK = "<think>\n@\n</think>\n\n"
INST: dict[str, Any] = {"assistant": " ", "alternating": True, "user": "[INST] @ [/INST]", "bos": "{{ bos_token }}"}
EOS = "{{ eos_token }}"

FAMILIES: dict[str, Family] = {
    "qwen2.5": chatml(**TOOL_CALL, words=TAGS),
    "qwen3": chatml(**TOOL_CALL, thoughts=BLOCK, which="tail", words=TAGS + THINK),
    "qwen3 thinking": chatml(**TOOL_CALL, thoughts=BLOCK, which="tail", prompt="<think>\n", words=TAGS + THINK),
    "qwen3.5": chatml(calls=TOOL_CALL["calls"], call=FUNCTION_XML, thoughts=BLOCK, which="last", words=TAGS + THINK),
    "internlm2.5": chatml(
        bos="{{ bos_token }}", calls=("<|action_start|>", "", "<|action_end|>"), call=PARAMETERS_CALL
    ),
    "minicpm3": chatml(calls=("<|tool_call_start|>", "\n", "<|tool_call_end|>"), call=PYTHONIC),
    "llama 2": Family(**INST | {"end": " " + EOS, "system": None}),
    "llama 3": headers("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", bos="{{ bos_token }}", tools=""),
    "llama 3.1": headers("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", call=PARAMETERS_CALL),
    "llama 4": headers(
        "<|header_start|>", "<|header_end|>\n\n", "<|eot|>", call=PYTHONIC, calls=("[", ", ", "]"), call_end="<|eom|>"
    ),
    "mistral 7b": Family(**INST | {"end": EOS, "system": None, "tool": None}),
    "mistral nemo": Family(
        "",
        EOS,
        "[INST]@[/INST]",
        "[INST]@[/INST]",
        "[TOOL_RESULTS]@[/TOOL_RESULTS]",
        ("[TOOL_CALLS][", ", ", "]"),
        JSON_CALL,
        bos="{{ bos_token }}",
        tools="[AVAILABLE_TOOLS]@[/AVAILABLE_TOOLS]",
    ),
    "gemma": headers(
        "<start_of_turn>",
        "\n",
        "<end_of_turn>\n",
        system=None,
        tool=None,
        tools="",
        alternating=True,
        assistant="<start_of_turn>model\n",
    ),
    "phi 4 mini": headers("<|", "|>", "<|end|>", call=JSON_CALL, calls=("<|tool_call|>[", ", ", "]<|/tool_call|>")),
    "chatglm3": headers("<|", "|>\n ", "", tools="", bos="[gMASK]<sop>"),
    "glm 4.6": headers(
        "<|",
        "|>\n",
        "",
        call=ARGUMENT_XML,
        calls=TOOL_CALL["calls"],
        thoughts=BLOCK,
        which="tail",
        bos="[gMASK]<sop>",
        tool="<|observation|>\n@",
        words=TAGS + THINK,
    ),
    "deepseek v3": Family(
        "<｜Assistant｜>",
        EOS,
        "<｜User｜>@",
        "@",
        "<｜tool▁output▁begin｜>@<｜tool▁output▁end｜>",
        ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n{{ c.arguments | tojson }}\n```"
        "<｜tool▁call▁end｜>",
        bos="{{ bos_token }}",
        tools="@",
    ),
    "kimi k2": Family(
        "<|im_assistant|>assistant<|im_middle|>",
        "<|im_end|>",
        "<|im_user|>user<|im_middle|>@<|im_end|>",
        "<|im_system|>system<|im_middle|>@<|im_end|>",
        "<|im_system|>tool<|im_middle|>@<|im_end|>",
        ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
        "<|tool_call_begin|>{{ t.id }}<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>",
        tools="<|im_system|>tool_declare<|im_middle|>@<|im_end|>",
    ),
    "minimax m2": Family(
        "]~b]ai\n",
        "[e~[\n",
        "]~b]user\n@[e~[\n",
        "]~!b[]~b]system\n@[e~[\n",
        "]~b]tool\n@[e~[\n",
        ("\n<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"),
        INVOKE_XML,
        thoughts="<think>\n@\n</think>\n\n",
        tools="@",
        words=(*THINK, "]~b]", "]~!b[", "[e~["),
    ),
    "gpt-oss": Family(
        "<|start|>assistant",
        "<|end|>",
        "<|start|>user<|message|>@<|end|>",
        "<|start|>developer<|message|>@<|end|>",
        "<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>@<|end|>",
        ("", "", ""),
        " to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}",
        "<|call|>",
        thoughts="<|channel|>analysis<|message|>@<|end|><|start|>assistant",
        tools="<|start|>developer<|message|>@<|end|>",
    ),
    "exaone 4": headers(
        "[|",
        "|]\n",
        "[|endofturn|]\n",
        call=JSON_CALL,
        calls=TOOL_CALL["calls"],
        thoughts=BLOCK,
        which="last",
        words=("[|endofturn|]", *THINK),
    ),
    "baichuan 2": Family("<reserved_107>", "", "<reserved_106>@", "@"),
    "vicuna": Family("ASSISTANT: ", EOS, "USER: @ ", "@\n"),
    "falcon": Family("Falcon: ", "\n", "User: @\n", "System: @\n"),
}
