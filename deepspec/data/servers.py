"""Asking any number of OpenAI-compatible servers: bounded, patient with what passes, clear about what does not."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..checked import InputError
from .prompts import Prompt
from .protocols import PROTOCOLS, Ask, BadReply, Protocol

try:
    import httpx
except ModuleNotFoundError:  # an extra
    raise InputError("asking servers needs httpx: pip install 'deepspec[servers]'") from None

_LOG = logging.getLogger(__name__)

Deliver = Callable[[dict[str, Any]], None]
"""Takes a finished row."""

_PASSING = {408, 409, 425, 429, 500, 502, 503, 504, 529}
"""HTTP statuses that another try may not meet; all others from 300 are for good."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """When to try again, and when to give up."""

    tries: int = 8
    """Failed tries after which a prompt is given up; tries at a server that is not there do not count."""
    seconds: float = 600.0
    """A server that has only failed for so long is given up."""
    first_rest: float = 0.5
    """Seconds before the next try; doubled after each failure in a row, up to 30, and spread by chance."""
    read: float = 1800.0
    """Seconds one answer may take."""


class _Passing(Exception):
    """A failure that another try may not meet."""

    def __init__(self, said: str, *, reached: bool = True, rest: float | None = None) -> None:
        super().__init__(said)
        self.reached, self.rest = reached, rest


@dataclass
class _Server:
    url: str
    protocol: Protocol
    max_length: int | None
    """Most tokens of prompt and answer, where the server says so."""
    failing_since: float | None = None
    given_up: bool = False


@dataclass
class _Job:
    prompt: Prompt
    tries: int = 0


@dataclass
class Outcome:
    """What became of the prompts that were not answered."""

    too_long: int = 0
    """Prompts that no server has room for: they were not asked."""
    given_up: list[tuple[str, str]] = field(default_factory=list)
    """(id, last failure) of prompts that failed at every try."""


def ask_servers(
    urls: Sequence[str],
    ask: Ask,
    prompts: Sequence[Prompt],
    deliver: Deliver,
    *,
    concurrency: int,
    met: Callable[[list[str]], None] = lambda kinds: None,
    model: str | None = None,
    protocol: str | None = None,
    key: str | None = None,
    patience: Patience | None = None,
) -> Outcome:
    """Have every prompt answered by one of the servers, `concurrency` requests in flight at each; `deliver` gets each
    row as it comes. A prompt that fails goes to whichever server is free next. `met` is told the servers' kinds first.

    InputError at once for what no other try would change (a wrong address, key, model or request: the server's own
    words), and when no server is left. Kinds and models are asked of the servers where they are not given.
    """
    patience = patience or Patience()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def run() -> Outcome:
        timeout = httpx.Timeout(30.0, read=patience.read, pool=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits) as client:
            found = await asyncio.gather(*(_meet(client, url, ask, model, protocol, patience) for url in urls))
            met([server.protocol.name for server in found])
            return await _Run(client, found, patience, deliver).all(prompts, ask.max_new_tokens, concurrency)

    try:
        return asyncio.run(run())
    except BaseExceptionGroup as group:  # of a TaskGroup; the first is the cause
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


class _Run:
    def __init__(self, client: Any, servers: list[_Server], patience: Patience, deliver: Deliver) -> None:
        self.client, self.servers, self.patience, self.deliver = client, servers, patience, deliver
        self.jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self.outcome = Outcome()

    async def all(self, prompts: Sequence[Prompt], new_tokens: int, concurrency: int) -> Outcome:
        rooms = [server.max_length for server in self.servers]
        room = min((r for r in rooms if r is not None), default=None)  # a prompt may go to any of them
        for prompt in prompts:
            if room is not None and len(prompt.prompt_ids) + new_tokens > room:
                self.outcome.too_long += 1
            else:
                self.jobs.put_nowait(_Job(prompt))
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(self._work(s)) for s in self.servers for _ in range(concurrency)]
            await self.jobs.join()
            for worker in workers:
                worker.cancel()
        return self.outcome

    async def _work(self, server: _Server) -> None:
        failures = 0
        while not server.given_up:
            job = await self.jobs.get()
            if server.given_up:  # while this one waited
                self.jobs.put_nowait(job)
                self.jobs.task_done()
                return
            try:
                row = await _answer(self.client, server, job.prompt)
            except _Passing as failure:
                failures += 1
                self._again(server, job, failure)
                self.jobs.task_done()
                rest = min(30.0, self.patience.first_rest * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.5)
                await asyncio.sleep(rest if failure.rest is None else failure.rest)
            else:
                failures, server.failing_since = 0, None
                self.deliver(row)
                self.jobs.task_done()

    def _again(self, server: _Server, job: _Job, failure: _Passing) -> None:
        """Put a failed job back, or give up the job, the server, or everything."""
        job.tries += failure.reached
        if job.tries >= self.patience.tries:
            self.outcome.given_up.append((job.prompt.id, f"{server.url}: {failure}"))
        else:
            self.jobs.put_nowait(job)  # before task_done, so that the queue is never taken for finished
        now = time.monotonic()
        server.failing_since = now if server.failing_since is None else server.failing_since
        if now - server.failing_since >= self.patience.seconds:
            server.given_up = True
            if all(s.given_up for s in self.servers):
                raise InputError(
                    f"no server has answered for {self.patience.seconds:g} seconds; the last: {server.url}: {failure}; "
                    "answers are kept, run again to go on"
                )


async def _answer(client: Any, server: _Server, prompt: Prompt) -> dict[str, Any]:
    protocol = server.protocol
    try:
        response = await _send(client, "POST", server.url + protocol.path, json=protocol.body(prompt))
        return protocol.row(prompt, _json(response))
    except BadReply as reply:
        raise _Passing(str(reply)) from None
    except InputError as error:
        raise InputError(f"{error} (asked for prompt {prompt.id!r})") from None


async def _meet(
    client: Any, url: str, ask: Ask, model: str | None, protocol: str | None, patience: Patience
) -> _Server:
    """Wait until the server at `url` answers, and learn its kind and its model."""
    url = _address(url)
    until = time.monotonic() + patience.seconds
    rest = patience.first_rest
    while True:
        try:
            listed = _json(await _send(client, "GET", f"{url}/v1/models"))
            break
        except (_Passing, BadReply) as failure:
            if rest == patience.first_rest:
                _LOG.warning("waiting for server %s: %s", url, failure)
            if time.monotonic() + rest > until:
                raise InputError(f"server {url} does not answer: {failure}") from None
            await asyncio.sleep(rest)
            rest = min(2 * rest, 30.0)
    models = {m["id"]: m for m in listed.get("data", ()) if isinstance(m, dict) and isinstance(m.get("id"), str)}
    if model is None:
        if len(models) != 1:
            raise InputError(f"server {url} has the models {', '.join(models) or 'none'}; name one with --model")
        model = next(iter(models))
    elif models and model not in models:
        raise InputError(f"server {url} has no model {model!r}; it has {', '.join(models)}")
    card = models.get(model, {})
    if protocol is None:
        owner = card.get("owned_by")
        protocol = owner if owner in ("vllm", "sglang") else await _other_kind(client, url)
    length = card.get("max_model_len")
    return _Server(url, PROTOCOLS[protocol](ask, model), length if isinstance(length, int) else None)


def _address(url: str) -> str:
    """`url` without a closing / or /v1; InputError where it is no http address."""
    try:
        parts = urllib.parse.urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        right = False
    if not right:
        raise InputError(f"server {url!r} is no address; it must look like http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1")


async def _other_kind(client: Any, url: str) -> str:
    """'transformers', which has paths that no other has, or else 'chat', which every other has."""
    try:
        paths = _json(await _send(client, "GET", f"{url}/openapi.json")).get("paths", {})
    except (InputError, _Passing, BadReply):
        return "chat"
    return "transformers" if {"/load_model", "/v1/completions"} <= set(paths) else "chat"


async def _send(client: Any, method: str, url: str, **more: Any) -> Any:
    """A response of status 200; _Passing or InputError otherwise."""
    try:
        response = await client.request(method, url, **more)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.LocalProtocolError) as error:
        raise InputError(f"server {url}: {error}") from None
    except httpx.TransportError as error:
        what = " ".join(str(error).split()) or type(error).__name__
        refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        raise _Passing(f"{what} ({type(error).__name__})", reached=not refused) from None
    if response.status_code == 200:
        return response
    said = f"HTTP {response.status_code}: {_said(response)}"
    if response.status_code in _PASSING:
        wait = response.headers.get("retry-after", "")
        raise _Passing(said, rest=min(float(wait), 300.0) if wait.isdecimal() else None)
    raise InputError(f"server {url}: {said}")


def _json(response: Any) -> dict[str, Any]:
    try:
        found = response.json()
    except ValueError:  # UnicodeDecodeError is one
        raise BadReply(f"a reply that is not JSON: {response.text[:60]!r}") from None
    if not isinstance(found, dict):
        raise BadReply(f"a reply that is no object: {response.text[:60]!r}")
    return found


def _said(response: Any) -> str:
    """What the server says about an error, on one line."""
    try:
        found = response.json()
    except ValueError:
        found = response.text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:300] or response.reason_phrase
