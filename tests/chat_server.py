"""A local server that speaks the chat protocol as far as a reader sees it, by a script of replies."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def completion(content):
    return {"id": "x", "object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": content}}]}


class ChatServer(ThreadingHTTPServer):
    """Replies to each request with what ``reply(number, body, headers)`` returns: status, headers, object or bytes.

    ``requests`` holds every body, ``headers`` every header, ``times`` when each came, ``most`` how many were open at
    once.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, reply):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply, self.lock = reply, threading.Lock()
        self.requests, self.headers, self.times, self.paths = [], [], [], []
        self.open = self.most = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address):
        """Say nothing where a client has gone: readers that time out do."""


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            number = len(server.requests)
            server.requests.append(body)
            server.headers.append(dict(self.headers))
            server.times.append(time.monotonic())
            server.paths.append(self.path)
            server.open += 1
            server.most = max(server.most, server.open)
        try:
            status, headers, content = server.reply(number, body, self.headers)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        finally:
            with server.lock:
                server.open -= 1

    def log_message(self, *args):
        pass


@contextmanager
def serving(reply):
    """Run a server for a moment; ``reply`` as in ``ChatServer``."""
    server = ChatServer(reply)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def echo(number, body, headers):
    """Answer with the question of the prompt in capitals."""
    text = body["messages"][0]["content"]
    return 200, {}, completion(text.rpartition("Question: ")[2].partition("\n")[0].upper())
