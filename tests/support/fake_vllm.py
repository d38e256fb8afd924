"""A small server with vLLM's interface, as its documents and its request model have it, and a real
model behind it.

It is stricter than vLLM: unknown fields, unknown endpoints and use in the wrong state are refused.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from transformers import AutoModelForCausalLM

from tests.support.local_service import LocalServer

# Of CompletionRequest in vllm/entrypoints/openai/completion/protocol.py (2026-11).
_FIELDS = {
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "logprobs",
    "stop_token_ids",
    "skip_special_tokens",
    "return_token_ids",
}

_LOADING = threading.Lock()  # transformers changes global settings while it reads


class FakeVllm:
    """The state of a server.

    Attributes:
        most_at_once: requests beyond this number at a time fail for lack of memory; 0: no limit.
        reads_weights: whether reload_weights does its work.
    """

    def __init__(self, folder: Path, *, most_at_once: int = 0) -> None:
        self.folder = folder
        self.most_at_once = most_at_once
        self.reads_weights = True
        self.longest = 64
        self.awake = {"weights", "kv_cache"}
        self.requests = list[str]()
        self.stale_cache = False
        self._under_way = 0
        self._lock = threading.Lock()
        self._model = _load(folder)

    # One answer for each path of vLLM's server.
    def handle(  # noqa: PLR0911
        self, path: str, query: dict[str, list[str]], body: dict[str, Any]
    ) -> tuple[int, Any]:
        self.requests.append(
            path + (f"?{'&'.join(f'{k}={v[0]}' for k, v in query.items())}" if query else "")
        )
        if path == "/v1/models":
            return 200, {"data": [{"id": str(self.folder), "max_model_len": self.longest}]}
        if path == "/sleep":
            if not self.awake:
                return 500, {"error": "already sleeping"}
            self.awake = set()
            return 200, None
        if path == "/is_sleeping":
            return 200, {"is_sleeping": not self.awake}
        if path == "/wake_up":
            self.awake |= set(query.get("tags", ["weights", "kv_cache"]))
            return 200, None
        if path == "/collective_rpc" and body == {"method": "reload_weights"}:
            if "weights" not in self.awake:
                return 500, {"error": "the weights have no memory"}
            if self.reads_weights:
                self._model = _load(self.folder)
            self.stale_cache = True
            return 200, {"results": [None]}
        if path == "/reset_prefix_cache":
            self.stale_cache = False
            return 200, None
        if path == "/v1/completions":
            return self._complete(body)
        return (404, {"detail": "Not Found"})

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        if unknown := body.keys() - _FIELDS:
            return 400, {"error": f"unknown {unknown}"}
        if self.awake != {"weights", "kv_cache"} or self.stale_cache:
            return 500, {"error": "not ready to generate"}
        if body["model"] != str(self.folder):
            return 404, {"error": "no such model"}
        with self._lock:
            self._under_way += 1
            full = bool(self.most_at_once) and self._under_way > self.most_at_once
        try:
            threading.Event().wait(0.01)  # so that requests overlap
            if full:
                return 500, {"error": "CUDA out of memory. Tried to allocate 2.00 GiB"}
            return 200, {"choices": [self._draw(body)]}
        finally:
            with self._lock:
                self._under_way -= 1

    @torch.no_grad()
    def _draw(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["seed"] is not None:
            generator = torch.Generator().manual_seed(body["seed"])
        else:
            generator = None
        tokens = list(body["prompt"])
        log_probs = []
        for _ in range(body["max_tokens"]):
            logits = self._model(torch.tensor([tokens])).logits[0, -1]
            spread = (logits / (body["temperature"] or 1.0)).log_softmax(-1)
            drawn = int(
                torch.multinomial(spread.exp(), 1, generator=generator)
                if generator
                else spread.argmax()
            )
            tokens.append(drawn)
            log_probs.append(float(spread[drawn]))
            if drawn in body["stop_token_ids"]:
                break
        return {
            "token_ids": tokens[len(body["prompt"]) :],
            "logprobs": {"token_logprobs": log_probs},
        }


@contextmanager
def serve_vllm(fake: FakeVllm) -> Iterator[str]:
    """Serve, and return the address."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            status, answer = fake.handle(parts.path, parse_qs(parts.query), body)
            if answer is None:
                content = b""
            else:
                content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _answer  # noqa: N815 (the base class's names)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = LocalServer(Handler, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _load(folder: Path) -> Any:
    with _LOADING:
        return AutoModelForCausalLM.from_pretrained(folder).eval()
