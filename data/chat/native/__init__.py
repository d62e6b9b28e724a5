"""Tokenizers that are published as Python files of their own, built without running these: one kind a file."""

CHATML_TOKENS = {"im_end_token": "<|im_end|>"}
CHATML = (  # as InternLM2 and Qwen were published, but for what stands before the messages
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
