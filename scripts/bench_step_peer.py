"""A step of speculators' DSpark or Eagle3 at the sizes of bench_step.py, for it to run under another Python."""

import json
import sys
import time

import bench_step as sizes
import torch


def backbone(kind: str, layers: int):
    """The draft layers' config, with attention that runs on a CPU."""
    from transformers import LlamaConfig, Qwen3Config

    made = (LlamaConfig if kind == "eagle3" else Qwen3Config)(
        hidden_size=sizes.D, intermediate_size=sizes.MLP, num_hidden_layers=layers, num_attention_heads=sizes.HEADS,
        num_key_value_heads=sizes.KV_HEADS, head_dim=sizes.HEAD, vocab_size=sizes.V, max_position_embeddings=4096,
        tie_word_embeddings=False,
    )  # fmt: skip
    made._attn_implementation = "sdpa"
    return made


def build(kind: str):
    """The model with frozen weights filled, and what its forward pass is given beside the batch."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    common = dict(
        draft_vocab_size=sizes.V,
        speculators_config=SpeculatorsConfig(
            algorithm=kind, proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=sizes.SLOTS)],
            default_proposal_method="greedy", verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )  # fmt: skip
    if kind == "eagle3":
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

        config = Eagle3SpeculatorConfig(
            transformer_layer_config=backbone(kind, 1), norm_before_residual=False, embed_requires_grad=False,
            eagle_aux_hidden_state_layer_ids=[2, 4, 6], **common,
        )  # fmt: skip
        model = Eagle3DraftModel(config)
        given = dict(ttt_steps=sizes.SLOTS, ttt_step_loss_decay=0.8, loss_config=resolve_loss_config("kl_div", "eager"))
    else:
        from speculators.models.dspark.config import DSparkSpeculatorConfig
        from speculators.models.dspark.core import DSparkDraftModel

        config = DSparkSpeculatorConfig(
            transformer_layer_config=backbone(kind, sizes.LAYERS), block_size=sizes.SLOTS, mask_token_id=4,
            aux_hidden_state_layer_ids=[2, 4, 6], markov_rank=sizes.RANK, **common,
        )  # fmt: skip
        model = DSparkDraftModel(config)
        given = dict(
            loss_config=resolve_loss_config('{"ce": 0.1, "tv": 0.9}', "eager"), max_anchors=sizes.ANCHORS, gamma=4.0,
            tv_loss_fn=resolve_loss_config("tv", "eager")["tv"][0],
        )  # fmt: skip
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.isfinite().all():  # what a verifier would have filled
                p.fill_(1.0) if p.dim() < 2 else p.normal_(0, 0.05 if "lm_head" in name else 0.02)
    return model, given


def main() -> None:
    kind, repeats = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, given = build(kind)
    tokens = torch.randint(0, sizes.V, (1, sizes.T))
    batch = dict(
        hidden_states=torch.randn(1, sizes.T, sizes.TAPS * sizes.D), input_ids=tokens, loss_mask=tokens >= 0,
        verifier_last_hidden_states=torch.randn(1, sizes.T, sizes.D), document_ids=torch.zeros_like(tokens),
    )  # fmt: skip

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(**batch, **given)[1]
        loss.backward()
        return float(loss.detach())

    before = sizes.peak_memory()
    loss = step()
    step()
    peak, times = sizes.peak_memory() - before, []
    for _ in range(repeats):
        began = time.process_time()
        step()
        times.append((time.process_time() - began) * 1e3)
    print(json.dumps({"peer": sorted(times)[len(times) // 2], "peak_mb": peak, "loss": loss}))


if __name__ == "__main__":
    main()
