"""Readers on this machine: a transformers decoder, an encoder-decoder, or an extractive question-answering head."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from retrieval_gym.nn import model_files
from retrieval_gym.readers.base import Reader, collect
from retrieval_gym.readers.prompts import clean_answer, prompt

LONGEST_WINDOW = 4096  # tokens; a tokenizer without a limit names one that no memory holds
STRIDE = 128  # tokens that neighbouring windows of an extractive reader share


def load_reader(
    name_or_path: str | Path, *, device: str | torch.device = "cpu", max_tokens: int = 64, batch_size: int = 8
) -> Reader:
    """Return the reader that a model is, told by the class that its configuration names.

    Weights are float32 on a CPU and bfloat16 elsewhere.

    Args:
        name_or_path: Hub id or folder of a transformers model with its tokenizer.
        device: where it runs.
        max_tokens: most tokens of an answer.
        batch_size: questions, or windows of an extractive reader, in one forward pass.

    Raises:
        FileNotFoundError: when there is no such model.
        ValueError: when it is of another kind, or a number is below 1.
    """
    import transformers

    if min(max_tokens, batch_size) < 1:
        raise ValueError(f"max_tokens {max_tokens}, batch_size {batch_size}: each must be at least 1")
    folder = model_files.find_model(name_or_path)
    config = transformers.AutoConfig.from_pretrained(folder)
    classes = [str(name) for name in config.architectures or []]
    auto: Any
    if any(name.endswith("ForQuestionAnswering") for name in classes):
        auto = transformers.AutoModelForQuestionAnswering
    elif config.is_encoder_decoder and any(name.endswith("ForConditionalGeneration") for name in classes):
        auto = transformers.AutoModelForSeq2SeqLM
    elif any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in classes):
        auto = transformers.AutoModelForCausalLM
    else:
        raise ValueError(
            f"{name_or_path} is no reader (its config.json says {classes}): give a decoder (ForCausalLM), an "
            "encoder-decoder (ForConditionalGeneration) or an extractive model (ForQuestionAnswering)"
        )
    device = torch.device(device)
    with model_files.quiet_transformers():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = auto.from_pretrained(folder)
    model = model.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16).eval()
    if auto is transformers.AutoModelForQuestionAnswering:
        return ExtractiveReader(model, tokenizer, max_tokens=max_tokens, batch_size=batch_size)
    return GenerativeReader(model, tokenizer, max_tokens=max_tokens, batch_size=batch_size)


class GenerativeReader:
    """Greedy answers of a decoder or an encoder-decoder to ``readers.prompt``, in its chat template where it has one.

    Where a prompt is longer than the model reads, its passages are cut to one length in characters, the largest that
    fits; the question stays whole. Without a chat template the answer ends at the first line break.

    Args:
        model: a transformers model that generates.
        tokenizer: its tokenizer.
        max_tokens: most tokens of an answer.
        batch_size: questions in one forward pass, sorted by length.

    Attributes:
        truncated: how many prompts were cut.

    Raises:
        ValueError: when the tokenizer has neither a padding nor an end token.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_tokens: int = 64, batch_size: int = 8) -> None:
        self._model, self._tokenizer, self._batch_size = model, tokenizer, batch_size
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise ValueError("the reader's tokenizer has neither a padding nor an end token: give it one")
            tokenizer.pad_token = tokenizer.eos_token
        self._decoder_only = not model.config.is_encoder_decoder
        tokenizer.padding_side = "left" if self._decoder_only else "right"
        self._chat = self._decoder_only and bool(tokenizer.chat_template)
        longest = model_files.longest_input(model.config.get_text_config(), tokenizer)
        self._limit = longest - (max_tokens if self._decoder_only else 0)
        self._generation = copy.deepcopy(model.generation_config)
        self._generation.update(
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            max_length=None,
            max_new_tokens=max_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
        self.truncated = 0

    def __call__(self, questions: list[str], passages: list[list[str]]) -> list[str]:
        """Return one answer a question; see ``Reader``."""
        return collect(self.stream(questions, passages), len(questions))

    def stream(self, questions: list[str], passages: list[list[str]]) -> Iterator[tuple[int, str]]:
        """Yield each question's place and answer, a batch at a time, the longest first.

        Raises:
            ValueError: when a question alone is longer than the model reads.
        """
        texts = [self._fit(*asked) for asked in zip(questions, passages, strict=True)]
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(order), self._batch_size):
            rows = order[start : start + self._batch_size]
            yield from zip(rows, self._generate([texts[i] for i in rows]), strict=True)

    @torch.inference_mode()
    def _generate(self, texts: list[str]) -> list[str]:
        batch = self._tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not self._chat)
        inputs = {key: batch[key].to(self._model.device) for key in ("input_ids", "attention_mask")}
        with model_files.quiet_transformers():
            output = self._model.generate(**inputs, generation_config=self._generation)
        if self._decoder_only:
            output = output[:, inputs["input_ids"].shape[1] :]
        answers = map(clean_answer, self._tokenizer.batch_decode(output, skip_special_tokens=True))
        return list(answers) if self._chat else [answer.partition("\n")[0].rstrip() for answer in answers]

    def _fit(self, question: str, passages: list[str]) -> str:
        """Return the model's input text, passages cut where it would be too long."""
        text = self._input(question, passages)
        if self._length(text) <= self._limit:
            return text
        self.truncated += 1
        fits, too_long = -1, max(map(len, passages), default=0)
        while too_long - fits > 1:
            size = (fits + too_long) // 2
            if self._length(self._input(question, [passage[:size] for passage in passages])) <= self._limit:
                fits = size
            else:
                too_long = size
        if fits < 0:
            raise ValueError(
                f"a question does not fit into the {self._limit} tokens that the reader takes: {question!r:.80}"
            )
        return self._input(question, [passage[:fits] for passage in passages])

    def _input(self, question: str, passages: list[str]) -> str:
        text = prompt(question, passages)
        if not self._chat:
            return text
        messages = [{"role": "user", "content": text}]
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _length(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=not self._chat, verbose=False)["input_ids"])


class ExtractiveReader:
    """The span of the passages that an extractive head scores highest, start and end logit added.

    Passages are read as one text, a line break between them, in overlapping windows. Without passages there is nothing
    to extract, and the answer is empty.

    Args:
        model: a transformers model with a question-answering head.
        tokenizer: its fast tokenizer.
        max_tokens: most tokens of a span.
        batch_size: windows in one forward pass.

    Raises:
        ValueError: when the tokenizer is not a fast one, which alone says where a token stands.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_tokens: int = 64, batch_size: int = 8) -> None:
        if not tokenizer.is_fast:
            raise ValueError("an extractive reader needs a fast tokenizer: give a model with a tokenizer.json")
        self._model, self._tokenizer = model, tokenizer
        self._max_tokens, self._batch_size = max_tokens, batch_size
        self._limit = min(model_files.longest_input(model.config, tokenizer), LONGEST_WINDOW)

    def __call__(self, questions: list[str], passages: list[list[str]]) -> list[str]:
        """Return one answer a question; see ``Reader``."""
        return collect(self.stream(questions, passages), len(questions))

    def stream(self, questions: list[str], passages: list[list[str]]) -> Iterator[tuple[int, str]]:
        """Yield each question's place and answer.

        Raises:
            ValueError: when a question leaves no room for its passages.
        """
        for place, (question, each) in enumerate(zip(questions, passages, strict=True)):
            yield place, self._extract(question, "\n".join(each))

    @torch.inference_mode()
    def _extract(self, question: str, text: str) -> str:
        if not text.strip():
            return ""
        frame = len(self._tokenizer(question, "", verbose=False)["input_ids"])
        room = self._limit - frame
        if room < 1:
            raise ValueError(f"a question leaves no room in the {self._limit} tokens of the reader: {question!r:.80}")
        windows = self._tokenizer(
            question,
            text,
            truncation="only_second",
            max_length=self._limit,
            stride=min(STRIDE, room // 2),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_tensors="pt",
            padding=True,
        )
        offsets = windows.pop("offset_mapping")
        windows.pop("overflow_to_sample_mapping")
        best, span = float("-inf"), (0, 0)
        for start in range(0, len(offsets), self._batch_size):
            rows = range(start, min(start + self._batch_size, len(offsets)))
            inputs = {key: values[start : rows.stop].to(self._model.device) for key, values in windows.items()}
            output = self._model(**inputs)
            for row, starts, ends in zip(rows, output.start_logits, output.end_logits, strict=True):
                inside = torch.tensor([part == 1 for part in windows.sequence_ids(row)], device=starts.device)
                scores = starts.float()[:, None] + ends.float()[None, :]
                scores = scores.masked_fill(~(inside[:, None] & inside[None, :]), float("-inf"))
                # A span ends where it starts or later, and is no longer than it may be.
                band = torch.ones_like(scores, dtype=torch.bool).triu().tril(self._max_tokens - 1)
                scores = scores.masked_fill(~band, float("-inf"))
                place = int(scores.argmax())
                first, last = divmod(place, scores.shape[1])
                if float(scores[first, last]) > best:
                    best = float(scores[first, last])
                    span = int(offsets[row, first, 0]), int(offsets[row, last, 1])
        return clean_answer(text[span[0] : span[1]])
