"""LoRA on tiny encoders: what trains, what stays, and that merging changes no vector."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from tiny import bert, qwen  # noqa: E402

from retrieval_gym.nn.encoder import TextEncoder  # noqa: E402
from retrieval_gym.nn.lora import adapter_dropout, add_lora, merge_lora  # noqa: E402

TEXTS = ["Who wrote it?", "a text about rivers and bridges " * 5, "x"]
ATTENTION_AND_MLP = {
    bert: {"query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"},
    qwen: {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
}
MODELS = pytest.mark.parametrize("make", [bert, qwen], ids=["bert", "qwen3"])


def vectors(encoder):
    return encoder.embed([encoder.sequence([ids], "query") for ids in encoder.tokenize(TEXTS)])


def train_a_little(encoder, steps=3):
    """Move what trains, by a lot: without adapters in motion nothing here would be tested."""
    weights = [weight for weight in encoder.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=0.05)
    target = torch.randn(len(TEXTS), encoder.dim, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        (vectors(encoder) * target).sum().backward()
        optimizer.step()


def adapted(encoder):
    return {name for name, module in encoder.model.named_modules() if hasattr(module, "lora_A")}


@MODELS
def test_adapters_change_nothing_at_first_and_alone_get_gradients(make):
    encoder = make()
    before, start = vectors(encoder).detach(), copy.deepcopy(encoder.state_dict())
    add_lora(encoder, rank=4, alpha=8)
    assert torch.equal(vectors(encoder), before)
    train_a_little(encoder)
    moved = (vectors(encoder) - before).abs().max()
    assert moved > 0.01
    for name, weight in encoder.named_parameters():
        assert weight.requires_grad == ("lora_" in name)
        assert (weight.grad is not None) == weight.requires_grad
        if not weight.requires_grad:
            assert torch.equal(weight, start[name.replace("base_layer.", "")])


@MODELS
def test_by_default_every_linear_layer_of_attention_and_mlp_is_adapted(make):
    encoder = make()
    linear = {name for name, module in encoder.model.named_modules() if isinstance(module, torch.nn.Linear)}
    add_lora(encoder, rank=2, alpha=2)
    assert adapted(encoder) == linear and len(linear) == 2 * len(ATTENTION_AND_MLP[make])
    assert all(any(name.endswith(f".{end}") for end in ATTENTION_AND_MLP[make]) for name in linear)


def test_targets_are_ends_of_names():
    encoder = qwen()
    add_lora(encoder, rank=2, alpha=2, targets=["q_proj", "v_proj"])
    assert adapted(encoder) == {f"layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in "qv"}


@MODELS
def test_merging_adds_alpha_by_rank_times_b_a_and_gives_the_same_vectors(make, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder, start = make(), make().state_dict()
    add_lora(encoder, rank=4, alpha=6)
    train_a_little(encoder)
    plain = merge_lora(encoder)
    assert adapted(encoder) and not adapted(plain) and plain.state_dict().keys() == start.keys()
    torch.testing.assert_close(vectors(plain), vectors(encoder), atol=1e-5, rtol=0)
    state = encoder.state_dict()
    for name in adapted(encoder):
        a, b = (state[f"model.{name}.lora_{part}.default.weight"] for part in "AB")
        expected = start[f"model.{name}.weight"] + 6 / 4 * b @ a
        torch.testing.assert_close(plain.state_dict()[f"model.{name}.weight"], expected, atol=1e-6, rtol=1e-5)

    plain.save(tmp_path / "model")
    ours = vectors(encoder).detach()
    torch.testing.assert_close(vectors(TextEncoder.load(tmp_path / "model")), ours, atol=1e-5, rtol=0)
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    torch.testing.assert_close(theirs.encode_query(TEXTS, convert_to_tensor=True), ours, atol=1e-5, rtol=0)


def test_only_the_adapters_dropout_is_switched():
    encoder = bert(dropout=0.5)
    add_lora(encoder, rank=4, alpha=8, dropout=0.5)
    encoder.eval()
    train_a_little(encoder)
    still = vectors(encoder)
    assert torch.equal(still, vectors(encoder))
    adapter_dropout(encoder, on=True)
    assert not torch.equal(vectors(encoder), vectors(encoder))
    assert all(not m.training for name, m in encoder.named_modules() if name.endswith(".dropout"))
    adapter_dropout(encoder, on=False)
    assert torch.equal(vectors(encoder), still)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        (dict(rank=0), "r"),
        (dict(dropout=1.0), "dropout is 1.0"),
        (dict(dropout=-0.1), "dropout is -0.1"),
        (dict(targets=["no_such_layer"]), "no_such_layer"),
    ],
)
def test_bad_numbers_and_names_are_refused(changes, pattern):
    with pytest.raises(ValueError, match=pattern):
        add_lora(bert(), **{"rank": 4, "alpha": 8, **changes})
