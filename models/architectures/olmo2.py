"""OLMo 2: the llama table with norms behind attention and feed-forward instead of before them."""

from models.architectures.llama import relative

FAMILY = relative("olmo2", "Olmo2")
