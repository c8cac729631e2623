"""The drafters named on the command line: what they are called, which target they are for, their weights."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from ..checked import InputError
from ..hub.files import find_drafter, read_config


def named(drafters: Sequence[str], option: str = "--drafter") -> dict[str, str]:
    """[NAME=]DIR -> {name: dir}. A name that is not given is the end of the path, as much as tells them apart; of
    RUN/drafter the last part says nothing and is left out. `option`: where they were given."""
    pairs = [_split(text) for text in drafters]
    names = [n for n, _ in pairs if n is not None]
    whole = [Path(path).absolute() for n, path in pairs if n is None]
    ends = [(p.parent if p.name == "drafter" else p).parts for p in whole]
    for length in range(1, max(map(len, ends), default=0) + 1):
        short = ["/".join(e[-length:]) for e in ends]
        if len({*names, *short}) == len(pairs):
            break
    else:
        short = []
    unnamed = iter(short)
    result = {(n if n is not None else next(unnamed, "")): path for n, path in pairs}
    if len(result) != len(pairs):
        raise InputError(
            f"{option}: the same name or directory twice: {', '.join(drafters)}; tell them apart by NAME=DIR"
        )
    if "baseline" in result:
        raise InputError(f"{option}: the name 'baseline' is taken by the target itself; use another NAME=DIR")
    return result


def _split(text: str) -> tuple[str | None, str]:
    name, sign, path = text.partition("=")
    if sign and path and re.fullmatch(r"[\w.+-]+", name) and not Path(text).exists():
        return name, path
    return None, text


def target_of(drafters: dict[str, str], given: str | None) -> tuple[str, str | None]:
    """(name or path, revision) of the target: `given`, or the one that every drafter's config.json names."""
    trained: dict[str, str | None] = {}
    for path in drafters.values():
        folder = find_drafter(path)
        section = read_config(folder).get("deepspec")
        target = section.get("target") if isinstance(section, dict) else None
        if isinstance(target, dict) and isinstance(target.get("name"), str):
            trained[target["name"]] = target.get("revision")
        elif given is None:
            raise InputError(f"{folder / 'config.json'} does not name the target the drafter is for; pass --target")
    if given is not None:
        return given, trained.get(given)
    if len(trained) > 1:
        raise InputError(
            f"the drafters are for different targets ({', '.join(trained)}); pass --target or run them apart"
        )
    return next(iter(trained.items()))


def fingerprint(path: str) -> str:
    """Changes where the drafter's weights do."""
    found = hashlib.sha256()
    for weights in sorted(find_drafter(path).glob("*.safetensors")):
        with weights.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
