"""A tiny tokenizer trained on import, and the kinds of chat template found in checkpoints."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not care at all.",
    "What is the capital of France? The capital of France is Paris.",
    "user assistant system think hello answer question thought number one two three",
] * 4

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of Qwen 2 and SmolLM."""

CHATML_TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same with the answers in generation blocks."""

CHATML_TAGGED_SHORT = CHATML_TAGGED.replace(
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}", "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}"
)
"""The generation block ends before the end-of-turn token."""

CHATML_TAGGED_WRONG = CHATML_TAGGED.replace("m['role'] == 'assistant'", "m['role'] == 'model'").replace(
    "{% else %}", "{% elif false %}{% generation %}{% endgeneration %}{% else %}"
)
"""The generation block is for a role that no message has."""

THINKING = (
    "{% set last = namespace(query=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.index0 > last.query %}"
    "{{ '<think>\n' + (m['reasoning_content'] or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Drops the reasoning of turns before the last question, like Qwen 3."""

OPENED_THOUGHT = THINKING.replace(
    "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}"
).replace("'<think>\n' + (m['reasoning_content'] or '') + '\n</think>\n\n'", "''")
"""The generation prompt opens a thought that the rendered turn does not have, like the R1 distillations."""

OPENED_THOUGHT_RAW = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
"""The same, but the rendered turn has the content as it is."""

CLOSED_THOUGHT = CHATML.replace(
    "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}"
)
"""The generation prompt forbids thoughts, like Qwen 3 with `enable_thinking: false`."""

SPACE_BEFORE_ANSWERS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ('<|im_end|>' if m['role'] == 'assistant' else '\n') }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
PLAIN_HEADERS = SPACE_BEFORE_ANSWERS.replace("{{ 'assistant: ' }}", "")
"""The same without a generation prompt."""

HEADERS_WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
"""Writes BOS, like Llama 3, whose tokenizer adds one too."""

NO_TURN_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)

NO_GENERATION_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
)
"""Ignores add_generation_prompt."""

NEXT_TURN_ENDS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + (('<think>' + m['reasoning_content'] + '</think>') "
    "if m['reasoning_content'] and loop.last else '') + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""Has no end-of-turn token, like GLM 4.5; past reasoning is dropped."""

NO_THOUGHTS = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
"""Drops all reasoning, like the R1 distillations."""

TEXT_CALLS = CHATML.replace(
    "+ m['content'] +", "+ m['content'] + (m['tool_calls'][0]['function']['arguments'] if m['tool_calls'] else '') +"
)
"""Concatenates tool call arguments as text, like DeepSeek."""

PRINTED_CALLS = TEXT_CALLS.replace("+ (m['tool_calls'][0]", "}}{{ (m['tool_calls'][0]").replace(
    "else '') +", "else '') }}{{"
)
"""Prints them, which writes an object as Python does."""

OBJECT_CALLS = TEXT_CALLS.replace("['arguments'] if", "['arguments'] | tojson if")
"""Writes tool call arguments as JSON, like Qwen."""

ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)


@functools.cache
def _backend(adds_bos: bool, kind: str) -> str:
    tokenizer = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    match kind:
        case "bytes" | "greedy":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        case "mistral" | "llama2":
            alphabet = sorted({*"".join(CORPUS), "\n", "▁", "é", *"<|_>:.1"})
            scheme = "first" if kind == "mistral" else "always"
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
            tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
        case "gemma":
            alphabet = sorted({*"".join(CORPUS), "\n", "▁", "é", *"<|_>:.1"})
            tokenizer.normalizer = normalizers.Replace(" ", "▁")
            tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
            tokenizer.decoder = decoders.Replace("▁", " ")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    corpus = (
        CORPUS
        if kind in ("bytes", "greedy")
        else [piece for text in CORPUS for piece in text.replace(" ", "¦ ").split("¦")]
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if kind == "greedy":
        tokenizer.add_special_tokens([AddedToken(text, special=True, rstrip=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    if adds_bos:
        bos = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
        adding = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[bos])
        before = [] if tokenizer.post_processor is None else [tokenizer.post_processor]
        tokenizer.post_processor = processors.Sequence([*before, adding])
    return tokenizer.to_str()


KINDS = {
    "bytes": "GPT-2, Llama 3, Qwen: byte-level, no space is added",
    "greedy": "Phi 3: special tokens take in the whitespace after them",
    "mistral": "Mistral: a space is put before a text",
    "llama2": "Llama 2: a space is put before a text, and after every special token",
    "gemma": "Gemma: no space is added, texts are not split into words",
}


def make_tokenizer(
    template: str | None = CHATML, *, adds_bos: bool = False, pad: str = "<|pad|>", kind: str = "bytes"
) -> PreTrainedTokenizerFast:
    """A BPE tokenizer with 400 tokens or fewer, called `tiny`; EOS is `<|im_end|>`. `kind`: see `KINDS`."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend(adds_bos, kind)),
        bos_token="<|begin|>",
        eos_token="<|im_end|>",
        pad_token=pad,
        extra_special_tokens=["<|im_start|>", "<|user|>", "<|assistant|>", "<|tool|>"],
    )
    tokenizer.chat_template = template
    tokenizer.name_or_path = "tiny"
    return tokenizer
