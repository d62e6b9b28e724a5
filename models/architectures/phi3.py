"""Phi-3 and Phi-4 mini: the llama table with fused projections, which stay fused; long-context rope is transformers'
own.
"""

from models.architectures.llama import relative

FAMILY = relative("phi3", "Phi3")
