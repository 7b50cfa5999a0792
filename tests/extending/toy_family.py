"""A model family of a user: Llama with scaled embeddings, registered with transformers under its own model type."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel


class ToyConfig(LlamaConfig):
    model_type = "toy_llama"
    embedding_multiplier: float = 3.0


class ToyModel(LlamaModel):
    config_class = ToyConfig

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids) * self.config.embedding_multiplier
        return super().forward(inputs_embeds=inputs_embeds, **kwargs)


class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig

    def __init__(self, config: ToyConfig):
        super().__init__(config)
        self.model = ToyModel(config)
        self.post_init()


AutoConfig.register("toy_llama", ToyConfig)
AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM)
