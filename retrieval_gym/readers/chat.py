"""A reader behind any chat endpoint that speaks OpenAI's protocol, by the standard library alone."""

from __future__ import annotations

import http.client
import json
import math
import queue
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn
from urllib.parse import urlsplit

from retrieval_gym.readers.base import collect
from retrieval_gym.readers.prompts import clean_answer, prompt

MAX_TOKENS, WORKERS, TIMEOUT, RETRIES = 64, 8, 120.0, 6
LONGEST_BACKOFF = 60.0  # seconds
LONGEST_WAIT = 600.0  # seconds that an endpoint may ask to wait before the run stops and says so
EXCERPT = 200  # characters of what an endpoint said
KEY_REFUSED, TIMED_OUT, TOO_MANY = (401, 403), (408, 425), 429


@dataclass(frozen=True)
class Endpoint:
    """Where a chat model is.

    Attributes:
        url: where requests go.
        shown: the same without its query, which may hold what nobody else should read.
        model: the model's name there.
    """

    url: str
    shown: str
    model: str

    @classmethod
    def parse(cls, url: str, model: str | None = None) -> Endpoint:
        """Read a URL such as ``http://localhost:8000/v1#MODEL``.

        ``/chat/completions`` is added where the path does not end so, and ``/v1`` where there is no path.

        Args:
            url: http or https.
            model: instead of the one behind ``#``.

        Raises:
            ValueError: when it has no host, holds a name or password, or no model is named, or two are.
        """
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port  # a port that is no number raises
        except ValueError as error:
            raise ValueError(f"a reader's URL is malformed ({error}): give one such as http://HOST:8000/v1") from None
        if parts.username is not None or parts.password is not None:
            raise ValueError("a reader's URL holds a user or a password: leave it out and name --api-key-env")
        if parts.scheme not in ("http", "https") or not host or any(c.isspace() for c in url):
            raise ValueError(f"reader {url!r} is no URL of an endpoint: give one such as http://HOST:8000/v1")
        if model and parts.fragment and model != parts.fragment:
            raise ValueError(f"the reader's URL names the model {parts.fragment!r} and --model is {model!r}: keep one")
        name = model or parts.fragment
        if not name:
            raise ValueError(f"no model is named for the reader at {host}: add --model NAME, or #NAME to the URL")
        path = parts.path.rstrip("/") or "/v1"
        if not path.endswith("/chat/completions"):
            path += "/chat/completions"
        shown = f"{parts.scheme}://{parts.netloc}{path}"
        return cls(f"{shown}?{parts.query}" if parts.query else shown, shown, name)


class _NotNow(Exception):
    """A request that may work later; ``after`` is how many seconds the endpoint asked to wait, if it did."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class _Stopped(Exception):
    """Nobody waits for the answers any more."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which would carry the key to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class ChatReader:
    """Answers by a chat model: one request a question, at temperature 0, several at a time.

    A request is repeated after 429, 5xx, a timeout or a connection that breaks, each time after twice as long a pause
    (with jitter), or after as long as ``Retry-After`` says, which then holds for all workers.

    Args:
        endpoint: where.
        api_key: sent as a bearer token; never part of a message.
        request: fields to add to each request or, where None, to leave out of it.
        max_tokens: most tokens of an answer.
        workers: requests at a time.
        timeout: seconds without a byte from the endpoint after which it counts as silent.
        retries: how often a request is repeated.
        backoff: the first pause in seconds.

    Raises:
        ValueError: when a number is out of range, or the key cannot stand in a header.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        api_key: str | None = None,
        request: Mapping[str, Any] | None = None,
        max_tokens: int = MAX_TOKENS,
        workers: int = WORKERS,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
        backoff: float = 1.0,
    ) -> None:
        if min(max_tokens, workers) < 1 or retries < 0:
            raise ValueError(f"max_tokens {max_tokens}, workers {workers}, retries {retries}: give at least 1, 1 and 0")
        if not (0 < timeout < math.inf and 0 <= backoff < math.inf):
            raise ValueError(f"timeout {timeout}, backoff {backoff}: give seconds above 0, and from 0")
        if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable()):
            raise ValueError("the API key is empty or holds characters that no header can: check how it was set")
        self.endpoint, self.workers, self.retries = endpoint, workers, retries
        self._api_key, self._timeout, self._backoff = api_key, timeout, backoff
        self._fields = {"model": endpoint.model, "temperature": 0, "max_tokens": max_tokens, **(request or {})}
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._pause_until, self._lock = 0.0, threading.Lock()

    def __call__(self, questions: list[str], passages: list[list[str]]) -> list[str]:
        """Return one answer a question; see ``stream`` for what it raises."""
        return collect(self.stream(questions, passages), len(questions))

    def stream(self, questions: list[str], passages: list[list[str]]) -> Iterator[tuple[int, str]]:
        """Yield each question's place and answer as they come.

        Raises:
            ConnectionError: when the endpoint cannot be reached, or does not answer after all repetitions.
            PermissionError: when it refuses the key.
            ValueError: when it refuses the request, or answers something that is not the protocol.
        """
        todo: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[int, str | Exception]] = queue.SimpleQueue()
        for place, asked in enumerate(zip(questions, passages, strict=True)):
            todo.put((place, prompt(*asked)))
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                try:
                    place, text = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((place, self._ask(text, stop)))
                except _Stopped:
                    return
                except Exception as error:
                    done.put((place, error))
                    return

        # Daemons: an interrupted run ends at once, whatever its requests are waiting for.
        for _ in range(min(self.workers, len(questions))):
            threading.Thread(target=work, daemon=True).start()
        try:
            for _ in questions:
                place, answer = done.get()
                if isinstance(answer, Exception):
                    raise answer
                yield place, answer
        finally:
            stop.set()

    def _ask(self, text: str, stop: threading.Event) -> str:
        for attempt in range(self.retries + 1):
            while (pause := self._pause_until - time.monotonic()) > 0:
                _sleep(pause, stop)
            try:
                return self._request(text)
            except _NotNow as error:
                again = error
            if again.after is not None and again.after > LONGEST_WAIT:
                raise ConnectionError(
                    f"{again}, and asks to wait {again.after:.0f} seconds: try again when they have passed"
                )
            if attempt == self.retries:
                break
            if again.after is None:
                longest = min(LONGEST_BACKOFF, self._backoff * 2**attempt)
                _sleep(longest * random.uniform(0.5, 1), stop)
            else:
                with self._lock:
                    self._pause_until = max(self._pause_until, time.monotonic() + again.after)
        raise ConnectionError(
            f"{again}, also after {self.retries} repetitions: try again later, with fewer workers or a longer timeout"
        )

    def _request(self, text: str) -> str:
        fields = {"messages": [{"role": "user", "content": text}], **self._fields}
        body = json.dumps({key: value for key, value in fields.items() if value is not None}).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "retrieval-gym"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        where = self.endpoint.shown
        try:
            with self._opener.open(
                urllib.request.Request(self.endpoint.url, body, headers), timeout=self._timeout
            ) as response:
                return self._read(response.read())
        except urllib.error.HTTPError as error:
            self._refused(error)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)  # URLError wraps what happened while connecting and sending
            if isinstance(reason, TimeoutError):
                raise _NotNow(f"{where} has not answered for {self._timeout:g} seconds") from error
            if isinstance(reason, ConnectionResetError | ConnectionAbortedError | BrokenPipeError):
                raise _NotNow(f"{where} broke the connection off") from error
            if isinstance(reason, http.client.IncompleteRead):
                raise _NotNow(f"{where} sent only a part of its answer") from error
            if isinstance(reason, http.client.HTTPException):
                raise ValueError(f"{where} does not speak HTTP ({type(reason).__name__}): check the URL") from error
            raise ConnectionError(f"{where} cannot be reached ({reason}): start it, or correct the URL") from error

    def _refused(self, error: urllib.error.HTTPError) -> NoReturn:
        """Turn an HTTP status into what it means for the run."""
        with error:
            try:
                said = self._excerpt(error.read())
            except (OSError, http.client.HTTPException):
                said = "nothing more"
        where, status = self.endpoint.shown, error.code
        told = f"{where} answers {status} ({said})"
        if status == TOO_MANY or status in TIMED_OUT or status >= 500:
            raise _NotNow(told, _retry_after(error.headers.get("Retry-After"))) from None
        if status in KEY_REFUSED:
            what = "no API key was sent" if self._api_key is None else "it refuses the API key"
            raise PermissionError(
                f"{told}: {what}; name the environment variable that holds one it takes with --api-key-env"
            )
        if 300 <= status < 400:
            raise ValueError(f"{told} and redirects to another address, which no key is sent to: give that one")
        if status == 404:
            raise ValueError(f"{told}: correct the URL, or the model's name {self.endpoint.model!r}")
        raise ValueError(f"{told} and takes no such request: see what it says; fewer passages make it shorter")

    def _read(self, data: bytes) -> str:
        """Return the answer in a response; a message without content is an empty one."""
        try:
            content = json.loads(data)["choices"][0]["message"]["content"]
            if content is not None and not isinstance(content, str):
                raise TypeError(content)
        except (ValueError, RecursionError, LookupError, TypeError):
            raise ValueError(
                f"{self.endpoint.shown} answers something that is not a chat completion ({self._excerpt(data)}): "
                "give the URL of an OpenAI-compatible endpoint"
            ) from None
        return clean_answer(content or "")

    def _excerpt(self, data: bytes) -> str:
        text = " ".join(data.decode("utf-8", "replace").split())
        if self._api_key is not None:
            text = text.replace(self._api_key, "***")
        return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."


def _sleep(seconds: float, stop: threading.Event) -> None:
    if stop.wait(seconds):
        raise _Stopped


def _retry_after(value: str | None) -> float | None:
    """Read a ``Retry-After`` header, seconds or a date (RFC 9110); None where there is none, or it says nothing."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
