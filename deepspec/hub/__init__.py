"""Reading and writing drafters in the formats that trainers and servers of this field share."""

from .native import load_drafter, save_drafter

__all__ = ["load_drafter", "save_drafter"]
