"""Small servers that speak as vLLM, SGLang, `transformers serve` and a bare chat server do, on loopback, in threads."""

import contextlib
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PATHS = {"vllm": "/v1/completions", "sglang": "/generate", "transformers": "/v1/completions"}
PATHS |= {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
WORDS = ("plain", "two\n\nlines", " leading", "ünï 你好", "a {x} b")


def answer(tokenizer, stop_id, text, most):
    """(ids with the stop id, finish) of a prompt: every letter its own token, as a sampler may draw them."""
    digest = hashlib.sha256(text.encode()).digest()
    words = "".join(WORDS[b % len(WORDS)] for b in digest[:3])
    ids = [i for c in words for i in tokenizer(c, add_special_tokens=False)["input_ids"]] + [stop_id]
    return (ids, "stop") if len(ids) <= most else (ids[:most], "length")


class Stub(ThreadingHTTPServer):
    """A server whose answer is a function of the prompt's text. `fail(n)` says what becomes of the n-th request, from
    1: None (answered), a status, "drop" (the connection), "garbage" (no JSON) or a reply of its own (a dict)."""

    daemon_threads = True

    def __init__(self, kind, tokenizer, fail=lambda n: None, *, stop_id, port=0, delay=0.0, room=None, models=("m",)):
        super().__init__(("127.0.0.1", port), Handler)
        self.kind, self.tokenizer, self.fail, self.stop_id, self.delay = kind, tokenizer, fail, stop_id, delay
        self.room, self.models = room, models
        self.lock, self.bodies, self.flying, self.most = threading.Lock(), [], 0, 0
        self.texts = []
        """The prompts that were answered."""
        self.keys = set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """A dropped connection is not worth a traceback."""

    def reply(self, body):
        """The reply to a request of this server's kind."""
        chat = self.kind == "chat"
        if chat:
            switch = body.get("chat_template_kwargs", {})
            prompt = self.tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, tokenize=False, **switch
            )
        else:
            prompt = body["input_ids"] if self.kind == "sglang" else body["prompt"]
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        with self.lock:
            self.texts.append(text)
        most = body["sampling_params"]["max_new_tokens"] if self.kind == "sglang" else body["max_tokens"]
        ids, finish = answer(self.tokenizer, self.stop_id, text, most)
        said = self.tokenizer.decode(ids, skip_special_tokens=True)
        asked = len(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        usage = {"prompt_tokens": asked, "completion_tokens": len(ids)}
        if self.kind == "sglang":
            reason = {"type": finish} | ({"matched": ids[-1]} if finish == "stop" else {"length": most})
            trimmed = ids[:-1] if finish == "stop" else ids
            return {"text": said, "output_ids": trimmed, "meta_info": {"finish_reason": reason, **usage}}
        choice = {"finish_reason": finish, "message" if chat else "text": {"content": said} if chat else said}
        if self.kind == "vllm":
            choice["token_ids"] = ids
        return {"choices": [choice], "usage": usage}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, status, value, raw=None):
        data = raw if raw is not None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        stub = self.server
        if self.path == "/v1/models":
            owner = stub.kind if stub.kind in ("vllm", "sglang") else "local"
            cards = [{"id": m, "owned_by": owner, "max_model_len": stub.room} for m in stub.models]
            return self.send(200, {"data": cards})
        if self.path == "/openapi.json" and stub.kind == "transformers":
            return self.send(200, {"paths": {"/load_model": {}, "/v1/completions": {}}})
        return self.send(404, {"detail": "Not Found"})

    def do_POST(self):
        stub = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stub.lock:
            stub.bodies.append(body)
            stub.keys.add(self.headers.get("Authorization"))
            stub.flying += 1
            stub.most = max(stub.most, stub.flying)
            number = len(stub.bodies)
        try:
            time.sleep(stub.delay)
            said = stub.fail(number)
            if self.path != PATHS[stub.kind]:
                self.send(404, {"detail": "Not Found"})
            elif said == "drop":
                self.close_connection = True
            elif said == "garbage":
                self.send(200, None, b"<html>")
            elif isinstance(said, dict):
                self.send(200, said)
            elif said is not None:
                self.send(said, {"error": {"message": f"so says {said}"}})
            else:
                self.send(200, stub.reply(body))
        finally:
            with stub.lock:
                stub.flying -= 1


@contextlib.contextmanager
def serving(*stubs):
    """The stubs, each answering in a thread of its own."""
    threads = [threading.Thread(target=stub.serve_forever, args=(0.02,), daemon=True) for stub in stubs]
    for thread in threads:
        thread.start()
    try:
        yield stubs
    finally:
        for stub, thread in zip(stubs, threads):
            stub.shutdown()
            stub.server_close()
            thread.join()
