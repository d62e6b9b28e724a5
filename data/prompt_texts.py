"""Define every text that Pipetune adds: the plain format's, and those for unsupported template features.

demo.py asks with the same ones, so that a model is asked exactly as it was trained.
"""

PLAIN_HEADER = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
PLAIN_HEADER_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
)
PLAIN_CONTEXT = "### {title}:\n{text}\n\n"
PLAIN_ANSWER = "### Response:\n"
PLAIN_ASK = "### Instruction:\n{ask}\n\n" + PLAIN_ANSWER
PLAIN_ASK_WITH_INPUT = "### Instruction:\n{ask}\n\n### Input:\n{input}\n\n" + PLAIN_ANSWER

CHAT_CONTEXT = "{title}:\n{text}\n\n"
CHAT_INPUT = "{ask}\n\n{input}"

REFERENCE_TITLE = "Reference"
SYSTEM_TITLE = "System"
API_TITLE = "APIs"
API_THOUGHT = "Thought: {thought}\n"
API_CALL = "Action: {name}\nAction Input: {param}\nObservation:"
API_RESULT = " {result}\n"
API_FINAL = "Final Answer: {ans}"
THINKING = "<think>\n{thought}\n</think>\n\n"  # where a template knows no thoughts, they are part of the answer
