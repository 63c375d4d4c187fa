"""The mean of an encoder's states and a linear layer, as a classifier of transformers.

This file needs torch and transformers alone: `softsieve export --to transformers` puts it beside the weights, and
``from_pretrained(folder, trust_remote_code=True)`` runs it from there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class MeanPooledConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """The configuration of the encoder, ``encoder``, and what every classifier says of its labels."""

    model_type = "softsieve-mean-pooled"

    def __init__(self, encoder: dict[str, Any] | None = None, **options: Any) -> None:
        self.encoder = encoder or {}
        super().__init__(**options)


class MeanPooledClassifier(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Logits of the mean of hidden states over the tokens of a text; without a loss, for it was trained elsewhere."""

    config_class = MeanPooledConfig
    base_model_prefix = "encoder"

    def __init__(self, config: MeanPooledConfig) -> None:
        super().__init__(config)
        encoder = AutoConfig.for_model(**config.encoder)
        self.encoder = AutoModel.from_config(encoder)  # type: ignore[no-untyped-call]
        if hasattr(self.encoder, "pooler"):
            self.encoder.register_module("pooler", None)
        self.classifier = nn.Linear(encoder.hidden_size, config.num_labels or 1)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        """Logits (rows, labels) of tokens (rows, positions)."""
        if attention_mask is None:
            attention_mask = input_ids.new_ones(input_ids.shape)
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **more).last_hidden_state
        share = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return SequenceClassifierOutput(logits=self.classifier((hidden * share).sum(1) / share.sum(1)))
