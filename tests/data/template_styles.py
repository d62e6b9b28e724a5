"""Chat templates in the styles of well-known models, written for these tests.

Each style names its control tokens, which the tests add to their tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import AddedToken, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Style:
    """A template and the tokens it writes: special ones, and those that are words of their own."""

    template: str
    special: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def put_on(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        tokens = [AddedToken(token, special=True, normalized=False) for token in self.special]
        tokens += [AddedToken(token, special=False, normalized=False) for token in self.words]
        tokenizer.add_tokens(tokens)
        tokenizer.chat_template = self.template
        return tokenizer


ASK_CHATML = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
SMOLLM2 = Style(
    """
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
"""
    + ASK_CHATML
)
QWEN_TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nCall with <tool_call> {\\"name\\": ...} </tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
QWEN_CALLS = """
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{\\"name\\": \\"' + call.function.name + '\\", \\"arguments\\": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
"""
QWEN_RESULTS = """
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""
QWEN_WORDS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
QWEN25 = Style(
    QWEN_TOOLS
    + """
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}{{- '<|im_start|>assistant\\n' + content }}
"""
    + QWEN_CALLS
    + QWEN_RESULTS
    + ASK_CHATML,
    words=QWEN_WORDS[:2],
)
QWEN3 = Style(  # thoughts before the last question are dropped, and looked for in the words
    QWEN_TOOLS
    + """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
"""
    + QWEN_CALLS
    + QWEN_RESULTS
    + ASK_CHATML,
    words=QWEN_WORDS,
)
LLAMA31 = Style(
    """
{{- bos_token }}
{%- set ns = namespace(described=false) %}
{%- if messages[0].role == 'system' %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + messages[0].content | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' and tools and not ns.described %}
        {%- set ns.described = true %}
        {{- '<|start_header_id|>user<|end_header_id|>\\n\\nYou may call these functions.\\n\\n' }}
        {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}
        {{- m.content | trim + '<|eot_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{\\"name\\": \\"' + call.name + '\\", \\"parameters\\": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
)
MISTRAL = Style(  # version 3: tools before the last question, ids of nine characters, roles in turn
    """
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set messages = messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- set ns = namespace(count=0, last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != (ns.count % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
        {%- set ns.count = ns.count + 1 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system + '\\n\\n' if system and loop.last else '') + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('nine characters') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', \\"id\\": \\"' + call.id + '\\"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content | trim + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {\\"content\\": ' + m.content + ', \\"call_id\\": \\"' + m.tool_call_id }}
        {{- '\\"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('no such role') }}
    {%- endif %}
{%- endfor %}
""",
    tuple("[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]".split()),
)
CHATGLM3 = Style(  # the next role's token ends a turn
    """
{{- '[gMASK]sop' }}
{%- for m in messages %}
    {%- set role = 'observation' if m.role == 'tool' else m.role %}
    {%- if m.tool_calls %}
        {%- for call in m.tool_calls %}
            {{- '<|assistant|>' + call.function.name + '\\n ' + (call.function.arguments | tojson) }}
        {%- endfor %}
    {%- else %}{{- '<|' + role + '|>\\n ' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
""",
    ("[gMASK]", "sop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
DEEPSEEK = Style(  # several tokens close a call, the prompt opens a thought, thoughts in the words are dropped
    """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- m.content }}
    {%- elif m.role == 'user' %}{{- '<User>' + m.content }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '<Assistant>' + m.content + '<calls>' }}
        {%- for call in m.tool_calls %}
            {{- '<call>' + call.function.name + '\\n' + (call.function.arguments | tojson) + '</call>' }}
        {%- endfor %}
        {{- '</calls>' + eos_token }}
    {%- elif m.role == 'assistant' %}{{- '<Assistant>' + m.content.split('</think>')[-1] + eos_token }}
    {%- else %}{{- '<result>' + m.content + '</result>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<Assistant><think>\\n' }}{%- endif %}
""",
    tuple("<User> <Assistant> <calls> </calls> <call> </call> <result> </result>".split()),
    ("<think>", "</think>"),
)
GEMMA = Style(  # no system, roles in turn, other names of roles
    """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
""",
    ("<start_of_turn>", "<end_of_turn>"),
)
GENERATION = Style(  # says itself what is generated, and forgets the end of the turn
    """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{- m.content }}{% endgeneration %}
    {%- else %}{{- m.content }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
"""
    + ASK_CHATML
)
HARMONY = Style(  # gpt-oss: channels, which no content may hold, and an end of the last answer alone
    """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if '<|channel|>analysis<|message|>' in m.content or '<|channel|>final<|message|>' in m.content %}
            {{- raise_exception('channel tags in the content') }}
        {%- endif %}
        {%- if loop.last and m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
""",
    ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
)
WORDS_LAST = Style(  # calls, their results, and then the words beside the calls
    """
{%- for m in messages if m.role != 'tool' %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- for call in m.tool_calls or [] %}
        {{- '<|call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '<call|>' }}
    {%- endfor %}
    {%- if m.tool_calls %}
        {%- for result in messages if result.tool_call_id in m.tool_calls | map(attribute='id') | list %}
            {{- '<|result>' + (result.content if RAW else result.content | tojson) + '<result|>' }}
        {%- endfor %}
    {%- endif %}
    {{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
""".replace("RAW", "result.content[:1] == '{'")
    + ASK_CHATML,
    ("<|call>", "<call|>", "<|result>", "<result|>"),
)
IN_PAIRS = Style(  # each call with its result behind it
    """
{%- for m in messages if m.role != 'tool' %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<|call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '<call|>' }}
        {%- for result in messages if result.tool_call_id == call.id %}
            {{- '<|result>' + result.content + '<result|>' }}
        {%- endfor %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
"""
    + ASK_CHATML,
    ("<|call>", "<call|>", "<|result>", "<result|>"),
)
STYLES = {
    "smollm2": SMOLLM2,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "llama3.1": LLAMA31,
    "mistral": MISTRAL,
    "chatglm3": CHATGLM3,
    "deepseek": DEEPSEEK,
    "gemma": GEMMA,
    "generation": GENERATION,
}
