"""Families whose parity with plain Hugging Face is tested (tests/engine/test_parity.py checks the list)."""

TESTED: frozenset[str] = frozenset(
    """
    afmoe apertus arcee aria_text bamba biogpt bitnet bloom codegen cohere cohere2 cohere2_moe ctrl cwm deepseek_v2
    deepseek_v3 deepseek_v32 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba
    flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neo
    gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jamba jetmoe kimi_linear laguna lfm2
    lfm2_moe llama llama4_text mamba mamba2 mimo_v2_flash minicpm3 minimax minimax_m2 ministral ministral3 mistral
    mixtral modernbert-decoder mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma
    rwkv seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm youtu
    """.split()
)
