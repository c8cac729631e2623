"""Sizes that vary from call to call, rounded up to few.

oneDNN makes a kernel for every shape of a bfloat16 product on a CPU. For the sizes of training that takes 10 to 30 ms,
two to fifteen times the product itself; a size that came before costs nothing.
"""

import torch


def few(n: int) -> int:
    """n or up to an eighth more, one of eight sizes an octave."""
    step = 1 << max(0, (n - 1).bit_length() - 4)
    return -(-n // step) * step


def rounded(n: int, device: str, dtype: torch.dtype | None = None) -> int:
    """`few` where products on this type of device have kernels made for their shapes, else n. dtype: of the products;
    None: what autocast makes them."""
    if dtype is None:
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    return few(n) if device == "cpu" and dtype.itemsize == 2 else n
