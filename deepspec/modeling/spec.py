"""What one decoder block of a target looks like, in plain numbers. Families fill it in; layers are built from it."""

from dataclasses import dataclass

from ..checked import Checked, require


@dataclass(frozen=True, kw_only=True)
class BlockSpec(Checked):
    """Read from a Hugging Face config by `families/`, saved with every drafter. Knows nothing of `transformers`."""

    dim: int
    """D: width of the residual stream."""
    heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int
    act: str = "silu"
    """'silu' or 'gelu_pytorch_tanh'."""
    norm_eps: float = 1e-6
    inv_freq: tuple[float, ...]
    """Rotary inverse frequencies, head_dim / 2 of them, radians a position; scaling is already in them."""
    rope_factor: float = 1.0
    """Multiplies cos and sin (attention factor of YaRN and its kind)."""
    attn_scale: float
    """Multiplies query-key products."""
    norm_offset: float = 0.0
    """Added to every stored norm weight (Gemma 3 stores them as distances from 1)."""
    sandwich: bool = False
    """Norms on each branch's output too (Gemma), not only on its input."""
    share_kv: bool = False
    """Values are the keys' projection, before norm and rotary (Gemma 4's full-attention layers)."""
    norm_values: bool = False
    """Values pass a norm without weights (Gemma 4)."""
    layer_scalar: bool = False
    """A stored number multiplies the block's output (Gemma 4)."""
    max_positions: int = 32768
    rope: tuple[tuple[str, str], ...] = ()
    """The target's rope_parameters as (key, JSON value) pairs, copied into saved configs."""
    target_layers: int = 0
    """Decoder layers of the target; 0: not known."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("silu", "gelu_pytorch_tanh")
        require(self.act in known, f"activation {self.act!r} is unknown; the drafter's block has {' and '.join(known)}")
        require(
            self.heads % self.kv_heads == 0, f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
        )
        require(
            len(self.inv_freq) * 2 == self.head_dim, f"inv_freq must hold head_dim / 2 = {self.head_dim / 2} numbers"
        )
