"""GLM-4-9B in transformers' layout (`-hf`): the llama table with interleaved rotary angles on half of each head and a
fused gate and up projection.
"""

from models.architectures.llama import relative

FAMILY = relative("glm", "Glm")
