"""Models to export, as the tests of models have them."""

from tests.common.test_parent import sleeper
from tests.models.conftest import both_layouts, llama, make_case

__all__ = ["both_layouts", "llama", "make_case", "sleeper"]
