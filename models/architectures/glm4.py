"""GLM-4-0414: the glm table with two more norms in each block."""

from models.architectures.llama import relative

FAMILY = relative("glm4", "Glm4")
