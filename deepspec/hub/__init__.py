"""Reading and writing drafters in the formats that trainers and servers of this field share."""

from .load import load_drafter
from .native import save_drafter

__all__ = ["load_drafter", "save_drafter"]
