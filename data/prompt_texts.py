"""Define every text that Pipetune adds: the plain format's, gdGPT's, and those for unsupported template features.

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

# gdGPT's, to the letter: its answers' heading is spelled so, and blanks stand where it has them.
GDGPT_CHAT = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions. \n\n"
)
GDGPT_REFERENCE = (
    "Generate responses to the given instruction series according to the reference text. \n\n"
    "### Reference: \n{reference}\n\n"
)
GDGPT_TOOLS = (
    "Answer the following questions as best as you can. You have access to the following tool(s):\n{description}"
)
GDGPT_OUTPUT = "{ans}\n{end}"
GDGPT_ASK = "### {name}: {ask} \n"
GDGPT_HEADING = "### {name}: "
GDGPT_ANSWER = "{ans} {end}\n"
GDGPT_CALL = "{thought}\n#### api call\n```python\n{call}\n```  {end}"
GDGPT_RESULT = "\n#### api output\n{result}\n"
GDGPT_FINAL = "{ans}  {end}"

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
