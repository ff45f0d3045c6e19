"""``TextEncoder``: any sentence-transformers or transformers model as texts to vectors, for acting and for training."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from retrieval_gym.nn import model_files
from retrieval_gym.nn.batching import batch_limits, cut_batches
from retrieval_gym.nn.pooling import Dense, Normalize, pool, pooling_mode
from retrieval_gym.nn.precision import use_bfloat16

Tokens = NDArray[np.int32]
Kind = Literal["query", "passage"]
KINDS = ("query", "passage")


class TextEncoder(nn.Module):
    """A transformer, its pooling, and what comes after it.

    Texts are tokenised once, into arrays without special tokens; ``sequence`` joins such arrays to one input, so that
    a state grows by a passage without tokenising anything again, and ``embed`` turns inputs into vectors.

    Attributes:
        dim: size D of the vectors.
        max_length: longest input in tokens, special tokens and prompt included.
        autocast: whether the forward pass runs in bfloat16 where torch holds that to be safe.
        prompts: text put before a ``"query"`` and a ``"passage"``.
        tokenized: number of texts that ``tokenize`` has seen.
        truncated: number of texts that ``tokenize`` or ``sequence`` has cut.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        pooling: str,
        heads: Sequence[nn.Module] = (),
        max_length: int | None = None,
        prompts: dict[str, str] | None = None,
        layers: Sequence[int] | None = None,
        autocast: bool = False,
    ) -> None:
        """Join the parts; see ``load`` for the usual way in.

        Args:
            model: a transformers model without a task head.
            tokenizer: its fast tokenizer.
            pooling: one of ``pooling.POOLING_MODES``.
            heads: ``Dense`` and ``Normalize`` modules, in order.
            max_length: longest input in tokens; None is the most that the model and its tokenizer take.
            prompts: text before a ``"query"`` and a ``"passage"``; None is no prompt.
            layers: transformer layers to keep, counted from 0 in ascending order; None keeps all.
            autocast: run the forward pass in bfloat16.

        Raises:
            ValueError: when the tokenizer is not a fast one, or ``max_length`` or ``layers`` do not suit the model.
        """
        super().__init__()
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer: the model needs a tokenizer.json")
        self.model = model
        self.heads = nn.ModuleList(heads)
        self.pooling = pooling
        self.prompts = dict(prompts or {"query": "", "passage": ""})
        self.autocast = autocast
        self.tokenized = self.truncated = 0
        if layers is not None:
            model_files.keep_layers(model, layers)
        dense = [head for head in heads if isinstance(head, Dense)]
        self.dim: int = dense[-1].linear.out_features if dense else int(model.config.hidden_size)  # type: ignore[union-attr, arg-type]
        self.hf_tokenizer = tokenizer
        self._set_up_tokenizer(tokenizer)
        limit = model_files.longest_input(model.config, tokenizer)
        self.max_length: int = limit if max_length is None else max_length
        overhead = max(len(self._prefix[kind]) for kind in KINDS) + len(self._suffix)
        if not overhead < self.max_length <= limit:
            raise ValueError(
                f"max_length={max_length} does not suit the model: choose from {overhead + 1} "
                f"(special tokens and prompt take {overhead}) to {limit}"
            )

    @classmethod
    def load(
        cls,
        name_or_path: str | Path = model_files.DEFAULT_MODEL,
        *,
        device: str | torch.device = "cpu",
        max_length: int | None = None,
        layers: Sequence[int] | None = None,
        autocast: bool = False,
        query_prompt: str | None = None,
        passage_prompt: str | None = None,
    ) -> TextEncoder:
        """Load a model with its own pooling, normalisation, prompts and length.

        Args:
            name_or_path: a folder or a Hub id, of a sentence-transformers or a plain transformers model (mean pooling).
            device: where it runs.
            max_length: longest input in tokens; None is the model's own.
            layers: transformer layers to keep, such as ``(0, 2, 5)``; None keeps all.
            autocast: run the forward pass in bfloat16; a processor without it stays in float32, and stderr says so.
            query_prompt: text before every query; None is the model's own, ``""`` is none.
            passage_prompt: text before every passage.

        Raises:
            FileNotFoundError: when there is no such model.
            ValueError: when the model has modules or a pooling that are not supported, or an argument does not suit it.
        """
        from transformers import AutoTokenizer

        folder = model_files.find_model(name_or_path)
        autocast = autocast and use_bfloat16(torch.device(device).type)
        modules = model_files.read_modules(folder)
        transformer, pooling = modules[0][1], modules[1][1]
        own_length = model_files.read_json(transformer / "sentence_bert_config.json").get("max_seq_length")
        prompts = model_files.model_prompts(folder, str(name_or_path))
        for kind, prompt in (("query", query_prompt), ("passage", passage_prompt)):
            if prompt is not None:
                prompts[kind] = prompt
        encoder = cls(
            model_files.load_transformer(transformer),
            AutoTokenizer.from_pretrained(transformer),
            pooling=pooling_mode(model_files.read_json(pooling / "config.json")),
            heads=[Dense.load(path) if name == "Dense" else Normalize() for name, path in modules[2:]],
            max_length=own_length if max_length is None else max_length,
            prompts=prompts,
            layers=layers,
            autocast=autocast,
        )
        if autocast and torch.device(device).type == "cpu":
            # The backward pass of the fused attention takes four times as long in bfloat16 as that of plain products.
            encoder.model.set_attn_implementation("eager")  # type: ignore[operator]
        return encoder.to(device).eval()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    # Tokens

    def _set_up_tokenizer(self, tokenizer: Any) -> None:
        """Take the tokenizer's core and read from it, by example, how it frames a text and joins two."""
        self._tokenizer = copy.deepcopy(tokenizer.backend_tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        body = self._ids("word")
        framed = self._tokenizer.encode("word", add_special_tokens=True).ids
        start = next((i for i in range(len(framed)) if framed[i : i + len(body)] == body), None)
        if start is None:
            raise ValueError(f"{type(tokenizer).__name__} does not keep the tokens of a text together")
        self._suffix = _tokens(framed[start + len(body) :])
        self._newline = _tokens([] if self._ids("word\nword") == body + body else self._ids("\n"))
        self._prefix: dict[str, Tokens] = {}
        self._lead: dict[str, str] = {}
        for kind in KINDS:
            prompt, self._lead[kind] = self._fit_prompt(self.prompts[kind])
            self._prefix[kind] = _tokens(framed[:start] + self._ids(prompt))
        # From here on a special token's name inside a text is plain text.
        self._tokenizer.encode_special_tokens = True
        self._pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    def _fit_prompt(self, prompt: str) -> tuple[str, str]:
        """Split a prompt so that its tokens followed by a text's tokens are the tokens of both together.

        Sentence pieces and byte-level words take the space before them, so a prompt's last space must go with the text.
        """
        whole = self._ids(prompt + "word")
        for cut, lead in ((prompt, ""), (prompt.rstrip(), ""), (prompt.rstrip(), prompt[len(prompt.rstrip()) :])):
            if self._ids(cut) + self._ids(lead + "word") == whole:
                return cut, lead
        return prompt, ""

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def tokenize(
        self, texts: Sequence[str], max_tokens: int | None = None, *, opens: Kind | None = None
    ) -> list[Tokens]:
        """Return the tokens of each text, int32 ``(n,)``, without special tokens and prompt.

        Args:
            texts: N texts; the name of a special token in them is plain text.
            max_tokens: cut each text after so many tokens, and count it in ``truncated``.
            opens: the kind of sequence that the texts open. It matters only for tokenizers that make a space part of
                the word after it, where the prompt ends with a space.
        """
        lead = self._lead[opens] if opens else ""
        encodings = self._tokenizer.encode_batch_fast([lead + text for text in texts], add_special_tokens=False)
        self.tokenized += len(texts)
        tokens = [np.array(encoding.ids, np.int32) for encoding in encodings]
        if max_tokens is None:
            return tokens
        self.truncated += sum(len(ids) > max_tokens for ids in tokens)
        return [ids[:max_tokens].copy() if len(ids) > max_tokens else ids for ids in tokens]

    def room(self, kind: Kind) -> int:
        """Return how many tokens of a text the model can take beside special tokens and prompt."""
        return self.max_length - len(self._prefix[kind]) - len(self._suffix)

    def sequence(self, segments: Sequence[Tokens], kind: Kind) -> Tokens:
        """Join tokenised segments to one input, int32 ``(n,)``, with special tokens, prompt and line breaks.

        Where the input would pass ``max_length``, tokens go from the ends of the middle segments, the oldest passage
        first; if the first segment (the question) and the last (the newest passage) do not fit together, each keeps at
        least half of the room.

        Args:
            segments: at least one array of tokens; of a state the question, then its passages.
            kind: whose prompt to use.
        """
        kept = list(segments)
        room = self.room(kind)
        excess = sum(map(len, kept)) + len(self._newline) * (len(kept) - 1) - room
        if excess > 0:
            self.truncated += 1
            kept = self._shorten(kept, excess, room)
        parts = [self._prefix[kind]]
        for i, segment in enumerate(kept):
            parts += [self._newline, segment] if i else [segment]
        return np.concatenate([*parts, self._suffix])

    def _shorten(self, segments: list[Tokens], excess: int, room: int) -> list[Tokens]:
        middle = segments[1:-1]
        while middle and excess > 0:
            if len(middle[0]) > excess:
                middle[0] = middle[0][:-excess]
                excess = 0
            else:
                excess -= len(middle.pop(0)) + len(self._newline)
        if excess <= 0:
            return [segments[0], *middle, segments[-1]]
        if len(segments) == 1:
            return [segments[0][:room]]
        room -= len(self._newline)
        first, last = segments[0], segments[-1]
        first = first[: max(room - len(last), (room + 1) // 2)]
        return [first, last[: room - len(first)]]

    @staticmethod
    def state_text(question: str, passages: Sequence[str]) -> str:
        """Return a state as one text: the question and the passages, a line break between them."""
        return "\n".join([question, *passages])

    # Vectors

    def embed(
        self,
        sequences: Sequence[Tokens],
        *,
        token_budget: int | None = None,
        told: Callable[[int], object] | None = None,
    ) -> Tensor:
        """Embed inputs made by ``sequence``; differentiable where gradients are on.

        Args:
            sequences: N arrays of tokens, each at least one long.
            token_budget: most tokens, padding included, in one forward pass; one input alone may pass it. None is
                what suits the device.
            told: is called after each forward pass with the number of its inputs.

        Returns:
            float32 ``(N, D)`` on the encoder's device, in the order of ``sequences``.
        """
        if len(sequences) == 0:
            return torch.zeros(0, self.dim, device=self.device)
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
        if not lengths.all():
            raise ValueError(
                f"input {int(lengths.argmin())} is empty: the model has no special tokens, so give it a text"
            )
        order = np.argsort(-lengths, kind="stable")
        with torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext():
            batches = cut_batches(lengths, order, *batch_limits(self.device, token_budget))
            chunks = []
            for rows in batches:
                chunks.append(self._embed_padded(sequences, lengths, rows))
                if told is not None:
                    told(len(rows))
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.from_numpy(order)] = torch.arange(len(order))
        return torch.cat(chunks)[back.to(self.device)]

    def _embed_padded(self, sequences: Sequence[Tokens], lengths: NDArray[np.int64], rows: NDArray[np.int64]) -> Tensor:
        lengths = lengths[rows]
        filled = np.arange(lengths.max()) < lengths[:, None]
        tokens = np.full(filled.shape, self._pad_id, np.int64)
        tokens[filled] = np.concatenate([sequences[row] for row in rows])
        # Without a mask, attention takes its fastest kernel.
        mask = None if filled.all() else torch.from_numpy(filled.astype(np.int64)).to(self.device)
        hidden = self.model(input_ids=torch.from_numpy(tokens).to(self.device), attention_mask=mask, **self._options())[
            0
        ]
        vectors = pool(hidden, torch.from_numpy(lengths).to(self.device), self.pooling)
        for head in self.heads:
            vectors = head(vectors)
        return vectors.float()

    def _options(self) -> dict[str, Any]:
        # A decoder would build a key-value cache that nobody reads.
        return {"use_cache": False} if "use_cache" in inspect.signature(self.model.forward).parameters else {}

    @torch.inference_mode()
    def encode(
        self,
        texts: Sequence[str],
        kind: Kind = "query",
        *,
        max_tokens: int | None = None,
        token_budget: int | None = None,
        told: Callable[[int], object] | None = None,
    ) -> Tensor:
        """Embed texts without gradients and without dropout; a text that occurs twice is embedded once.

        Args:
            texts: N texts.
            kind: whose prompt to use.
            max_tokens: cut each text after so many tokens.
            token_budget: most tokens in one forward pass; see ``embed``.
            told: is called after each forward pass with the number of texts that it embedded; see ``embed``.

        Returns:
            float32 ``(N, D)`` on the encoder's device.
        """
        place: dict[str, int] = {}
        rows = [place.setdefault(text, len(place)) for text in texts]
        tokens = self.tokenize(list(place), max_tokens, opens=kind)
        sequences = [self.sequence([ids], kind) for ids in tokens]
        was_training = self.training
        self.eval()
        try:
            vectors = self.embed(sequences, token_budget=token_budget, told=told)
        finally:
            self.train(was_training)
        return vectors[torch.tensor(rows, dtype=torch.int64, device=self.device)]

    # Identity and files

    def weights_hash(self) -> str:
        """Return the SHA-256 of every weight, 64 hexadecimal digits."""
        return model_files.weights_hash(self)

    def settings(self) -> dict[str, Any]:
        """Return everything but the weights that changes a vector, as JSON-able values."""
        return {
            "model": type(self.model).__name__,
            "pooling": self.pooling,
            "heads": [head.config if isinstance(head, Dense) else "Normalize" for head in self.heads],
            "prompts": dict(self.prompts),
            "max_length": self.max_length,
            "layers": int(self.model.config.num_hidden_layers),  # type: ignore[union-attr, arg-type]
            "dtype": str(next(self.parameters()).dtype).removeprefix("torch."),
            "autocast": self.autocast,
            "tokenizer": hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest(),
        }

    def save(self, directory: str | Path) -> None:
        """Write a folder that ``SentenceTransformer(directory)`` and ``TextEncoder.load(directory)`` open.

        The folder is written beside and renamed; one that stands there is replaced.
        """
        model_files.replace_folder(Path(directory), self._write)

    def _write(self, folder: Path) -> None:
        with model_files.quiet_transformers():
            self.model.save_pretrained(folder)  # type: ignore[operator]
        self.hf_tokenizer.save_pretrained(folder)
        modules = ["Transformer", "Pooling", *(type(head).__name__ for head in self.heads)]
        places = ["", *(f"{i}_{name}" for i, name in enumerate(modules) if i)]
        listing = [
            {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{name}"}
            for i, (name, place) in enumerate(zip(modules, places, strict=True))
        ]
        model_files.write_json(folder / "modules.json", listing)
        bert_config: dict[str, Any] = {"max_seq_length": self.max_length, "do_lower_case": False}
        if "add_pooling_layer" in inspect.signature(type(self.model).__init__).parameters:
            # Else the opener would make a layer that nothing uses, and report its weights as missing.
            bert_config["model_args"] = {"add_pooling_layer": False}
        model_files.write_json(folder / "sentence_bert_config.json", bert_config)
        modes = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens", "lasttoken": "lasttoken"}
        pooling = {f"pooling_mode_{key}": mode == self.pooling for mode, key in modes.items()}
        hidden_size = self.model.config.hidden_size  # type: ignore[union-attr]
        model_files.write_json(folder / places[1] / "config.json", {"word_embedding_dimension": hidden_size, **pooling})
        for place, head in zip(places[2:], self.heads, strict=True):
            (folder / place).mkdir()
            if isinstance(head, Dense):
                from safetensors.torch import save_file

                model_files.write_json(folder / place / "config.json", head.config)
                save_file(head.state_dict(), folder / place / "model.safetensors")
        prompts = {"query": self.prompts["query"], "document": self.prompts["passage"]}
        similarity = "cosine" if any(isinstance(head, Normalize) for head in self.heads) else "dot"
        model_files.write_json(
            folder / "config_sentence_transformers.json",
            {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": similarity},
        )
        model_files.write_json(folder / model_files.SAVED_SETTINGS, {"prompts": self.prompts})


def _tokens(ids: Sequence[int]) -> Tokens:
    return np.array(ids, np.int32)
