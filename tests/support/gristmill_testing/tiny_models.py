"""Tiny random models in the layout of a prepared base model, for tests that need real torch."""

from pathlib import Path
from typing import Any, Final

from gristmill_worker.facts import gather_facts, write_facts

VOCABULARY: Final = 512
CONTEXT: Final = 1024
BOS, EOS, PAD, IM_START, IM_END = "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"
SPECIALS: Final = (PAD, BOS, EOS, IM_START, IM_END)
WORDS: Final = (
    "ABCDEF", " the", " token", " session", " ledger", " answer", " question", " hello", " world",
    "user", "assistant", "system", " gradient", " sample", " number", " seven", " twelve", " return",
    " model", " adapter", " weights", " stop", " people", " because", " through", " without",
    " another", " nothing", " something", " morning", " evening", " yellow", " orange", " purple",
    " green", " between", " against", " children", " mountain", " question", " river", " winter",
    " summer", " station", " kitchen", " picture", " music", " village", " history", " science",
)  # fmt: skip
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_llama(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """h 64, 2 layers, 4 heads over 2, V 512, context 1024. `overrides` go to LlamaConfig."""
    from transformers import LlamaConfig

    return _build(path, seed, LlamaConfig(**{**_llama_like(), **overrides}))


def build_tiny_qwen2(path: Path, seed: int = 0) -> Path:
    """Biases on q, k and v; tied embeddings."""
    from transformers import Qwen2Config

    return _build(path, seed, Qwen2Config(**_llama_like(), tie_word_embeddings=True))


def build_tiny_mistral(path: Path, seed: int = 0, window: int = 16) -> Path:
    """Attention sees `window` positions."""
    from transformers import MistralConfig

    return _build(path, seed, MistralConfig(**_llama_like(), sliding_window=window, head_dim=16))


def build_tiny_gpt2(path: Path, seed: int = 0) -> Path:
    """Linear layers are transformers' Conv1D, with biases; tied embeddings."""
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=4,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
    )
    return _build(path, seed, config)


def build_tiny_falcon(path: Path, seed: int = 0) -> Path:
    """Multi-query attention, parallel block, no biases."""
    from transformers import FalconConfig

    config = FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _build(path, seed, config)


def build_tiny_falcon_alibi(path: Path, seed: int = 0) -> Path:
    """Distance to a key as a bias on its score; a key head each, biases."""
    from transformers import FalconConfig

    config = FalconConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, initializer_range=0.1, bos_token_id=1, eos_token_id=2,
        alibi=True, multi_query=False, bias=True,
    )  # fmt: skip
    return _build(path, seed, config)


def build_tiny_bloom(path: Path, seed: int = 0) -> Path:
    """Alibi, in attention of the family's own; tied embeddings."""
    from transformers import BloomConfig

    config = BloomConfig(
        vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.1,
        seq_length=CONTEXT, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _build(path, seed, config)


def build_tiny_mpt(path: Path, seed: int = 0) -> Path:
    """Alibi, as another family of its own reckons it; tied embeddings."""
    from transformers import MptConfig

    config = MptConfig(
        vocab_size=VOCABULARY, d_model=64, n_layers=2, n_heads=4, max_seq_len=CONTEXT,
        initializer_range=0.1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _build(path, seed, config)


def build_tiny_gemma2(path: Path, seed: int = 0) -> Path:
    """Scores and logits capped, a window of 16 in every other layer; tied embeddings."""
    from transformers import Gemma2Config

    config = Gemma2Config(**_llama_like(), head_dim=16, sliding_window=16)
    return _build(path, seed, config)


def tiny_tokenizer() -> Any:
    """Byte-level BPE with 512 entries. Encoding adds BOS, as the chat template does too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*SPECIALS, *alphabet]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        spelt = word.replace(" ", "\u0120")
        for end in range(2, len(spelt) + 1):
            if spelt[:end] not in entries and len(entries) < VOCABULARY:
                merges.append((spelt[: end - 1], spelt[end - 1]))
                entries.append(spelt[:end])
    while len(entries) < VOCABULARY:
        entries.append(f"<unused{len(entries)}>")
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[IM_START, IM_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _llama_like() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _build(path: Path, seed: int, config: Any) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    path.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = [2, 4]
    model.save_pretrained(path)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(path)
    facts = gather_facts(
        path,
        tokenizer_eos=tokenizer.eos_token_id,
        dtype="float32",
        hugging_face_id=str(path.resolve()),
    )
    write_facts(path, facts)
    return path
