"""Answers through a real server, killed twice: `transformers serve` on loopback; then again with a second server, one
that fails every third request. The rows must be the same, each once."""

import argparse
import contextlib
import http.server
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from deepspec import cache, cli
from deepspec.checked import InputError
from deepspec.data.manifest import read_manifest
from deepspec.data.protocols import as_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=cache.cache_dir("smollm2-135m-instruct"))
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--n", type=int, default=200, help="prompts (default 200)")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="in the second pass, servers repeat the first one's replies: the real one's bfloat16 depends on the batch",
    )
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32", help="of the server (default float32)")
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument(
        "--serve-options",
        default="--continuous-batching --cb-max-batch-tokens 512 --cb-num-blocks 112",
        help="of transformers serve, in one string (default: batches, for one request at a time takes hours on a CPU)",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory; what is there already is gone on with")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    first, again = args.out / "first.jsonl", args.out / "again.jsonl"
    with contextlib.ExitStack() as running:
        if count(first) < args.n or not args.replay:
            url = running.enter_context(real_server(args))
            answers(args, [url], first, kill_at=(args.n // 4, args.n // 2))
        rows = read(first, args.n)
        if args.replay:
            url = running.enter_context(replaying_server(args.target, rows))
        second, served = running.enter_context(failing_server(url))
        answers(args, [second, url], again)
    repeated = read(again, args.n)
    if different := [i for i in rows if rows[i] != repeated.get(i)]:
        raise InputError(f"{len(different)} rows differ between the two passes, the first {different[0]}")
    report = {
        "prompts": args.n,
        "replayed": args.replay,
        "requests to the failing server": dict(zip(("all", "failed"), served)),
        "first": read_manifest(first),
        "again": read_manifest(again),
    }
    cache.write_text(args.out / "report.json", json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    print(f"{args.n} rows, each once, the same in both passes")


def answers(args: argparse.Namespace, urls: list[str], out: Path, kill_at: tuple[int, ...] = ()) -> None:
    """Run `deepspec.data answers` to its end, after a SIGKILL at each number of rows in `kill_at`."""
    began = time.monotonic()
    command = [sys.executable, "-m", "deepspec.data", "answers", "--target", str(args.target), "--out", str(out)]
    command += ["--prompts", *map(str, args.prompts), "--limit", str(args.n), "--temperature", "0"]
    command += ["--max-new-tokens", str(args.max_new_tokens), "--dtype", args.dtype]
    command += ["--concurrency", str(args.concurrency), "--server", *urls]
    for rows in (*kill_at, None):
        before = count(out)
        if rows is not None and before >= rows:
            continue  # an earlier run of this script was there already
        child = subprocess.Popen(command)
        while rows is not None and child.poll() is None and count(out) < rows:
            time.sleep(0.05)
        if rows is not None and child.poll() is None:
            child.send_signal(signal.SIGKILL)
            print(f"{out.name}: killed with {count(out)} rows ({before} before)", flush=True)
        if child.wait() not in (0, -signal.SIGKILL):
            raise InputError(f"{out.name}: the command ended with {child.returncode}")
    print(f"{out.name}: {count(out)} rows after {time.monotonic() - began:.0f} seconds", flush=True)


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def read(path: Path, n: int) -> dict[str, Any]:
    """Rows by id; InputError unless there are n, each once."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {row["id"]: row for row in rows}
    manifest = read_manifest(path)
    if not len(rows) == len(found) == n or manifest is None or manifest["answers"] != n:
        raise InputError(f"{path}: {len(rows)} rows with {len(found)} ids, where {n} were asked")
    return found


@contextlib.contextmanager
def real_server(args: argparse.Namespace) -> Iterator[str]:
    """`transformers serve` with the target, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("transformers")
    command = [str(program), "serve", str(args.target), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with (args.out / "server.log").open("ab") as log:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command += ["--dtype", args.dtype, *shlex.split(args.serve_options)]
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


@contextlib.contextmanager
def failing_server(url: str) -> Iterator[tuple[str, list[int]]]:
    """A server that hands requests on to `url`, and fails every third answer: in turns with a status 500, a status 429
    and a closed connection. Gives its address and [requests, failures]."""
    served, lock = [0, 0], threading.Lock()

    class Handler(Quiet):
        def do_GET(self) -> None:
            self.hand_on(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                served[0] += 1
                fails = served[0] % 3 == 0
                served[1] += fails
                way = served[1] % 3
            if not fails:
                self.hand_on(body)
            elif way:
                self.send_error((500, 429)[way - 1])

        def hand_on(self, body: bytes | None) -> None:
            request = urllib.request.Request(url + self.path, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as reply:
                self.send_response(reply.status)
                self.end_headers()
                self.wfile.write(reply.read())

    with serving(Handler) as address:
        yield address, served


@contextlib.contextmanager
def replaying_server(target: Path, rows: dict[str, Any]) -> Iterator[str]:
    """A server that speaks as `transformers serve` does, and says what is in `rows`."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    replies = {}
    for row in rows.values():
        text = tokenizer.decode(row["answer_ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        usage = {"completion_tokens": len(row["answer_ids"]) + row["drift"], "prompt_tokens": len(row["prompt_ids"])}
        reply = {"choices": [{"text": text, "finish_reason": row["finish"]}], "usage": usage}
        replies[as_text(tokenizer, row["prompt_ids"])] = reply

    class Handler(Quiet):
        def do_GET(self) -> None:
            models = {"data": [{"id": str(target), "owned_by": "local"}]}
            self.say(models if self.path == "/v1/models" else {"paths": {"/load_model": {}, "/v1/completions": {}}})

        def do_POST(self) -> None:
            self.say(replies[json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]])

        def say(self, value: Any) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

    with serving(Handler) as address:
        yield address


class Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(handler: type[Quiet]) -> Iterator[str]:
    """An HTTP server in threads, by its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    cli.main(main)
