"""Recognition of secret-looking values, and their masking in all output.

Environment variables (names in capitals): `*_TOKEN`, `*_KEY`, `*_PASS`, `*_PAT`, `*_DSN`, `*_AUTH`, `*_PRIVATE` and the
other suffixes below, also followed by a number, `_B64` or `_JSON`, and names that contain PASSWORD, PASSWD, PASSPHRASE,
SECRET, CREDENTIAL or AUTHORIZATION. `*_CREDENTIALS`, `*_AUTH` and the like may name a file: a path is no secret.

Configuration keys (any other spelling): names that contain the same words; `*token`, except special tokens such as
`pad_token`; and `*_key` only after a word such as `api`, `access` or `private`. `max_tokens` and `identity_file` are no
secrets.

Texts anywhere: the password of a URL (`postgres://user:PASSWORD@host`), and the token of an HTTP URL
(`https://TOKEN@host`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from functools import cache, lru_cache
from typing import Final, cast

from rlinf_core.config.tree import Entry, MappingNode, Node, Path, ScalarNode, SequenceNode, scalars
from rlinf_core.process.known_secrets import MASK, SHORTEST

_ALWAYS: Final = ("password", "passwd", "passphrase", "secret", "credential", "authorization")
# Suffixes of the names of environment variables.
_VARIABLE_ENDS: Final = (
    *("AUTH", "BEARER", "CONNECTION_STRING", "COOKIE", "COOKIES", "CREDS", "DSN", "JWT", "OTP", "PASS", "PASSCODE"),
    *("PAT", "PRIVATE", "PW", "PWD", "SAS", "SESSION", "WEBHOOK", "WEBHOOK_URL"),
)
# Suffixes of variables whose value may also be a file's path.
_FILE_ENDS: Final = ("_AUTH", "_COOKIE", "_COOKIES", "_CREDENTIALS", "_CREDS", "_PRIVATE", "_SESSION")
_PATH: Final = re.compile(
    r"(~|\.{1,2})?/[^\s+=:]*|[^\s+=:]+\.(json|ya?ml|toml|ini|conf|txt|env|pem|key|crt|pub|asc|gpg)"
)
# Holds the kind of desktop, despite its suffix.
_NO_SECRETS: Final = ("DESKTOP_SESSION",)
_FORM: Final = re.compile(r"_?([0-9]+|B64|BASE64|JSON)\Z")
_SPECIAL_TOKENS: Final = frozenset(
    (
        *("action", "bos", "cls", "end", "eos", "eot", "image", "mask", "newline", "pad", "per", "sep"),
        *("special", "start", "state", "stop", "think", "unk", "video"),
    )
)
_SECRET_KEYS: Final = frozenset(
    ("access", "account", "api", "auth", "encryption", "private", "service", "signing", "ssh")
)
_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


@cache
def _url_secret() -> re.Pattern[str]:
    """Return the pattern of a password in a URL. Cached here so that it is only compiled for a text with a URL."""
    return re.compile(
        r"(?<![A-Za-z0-9])(?:[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#:@'\"`]*:|(?:git\+)?https?://(?=[^\s/?#:@'\"`]+@))"
        r"(?P<secret>(?!\$\{)[^\s/?#'\"`]+)@",
        re.IGNORECASE,
    )


def is_secret(name: str, value: object = None) -> bool:
    """Return whether the value of a variable or key must be masked. Only the last part of a name `a.b` counts.

    If `value` is given and names a file, some suffixes such as `_AUTH` are no secrets.
    """
    name = name.rpartition(".")[2].replace("-", "_")  # as in `X-API-KEY`
    if name.isupper():
        name = _FORM.sub("", name)
        if name in _NO_SECRETS or (name.endswith(_FILE_ENDS) and isinstance(value, str) and _PATH.fullmatch(value)):
            return False
    return _looks_secret(name)


@lru_cache(maxsize=4096)
def _looks_secret(name: str) -> bool:
    folded = name.casefold()
    if any(word in folded for word in _ALWAYS):
        return True
    if name.isupper() and name.endswith(tuple(f"_{end}" for end in _VARIABLE_ENDS)):
        return True
    if not ("token" in folded or "key" in folded):
        return False
    if name.isupper():
        return name in ("TOKEN", "KEY", "APIKEY") or name.endswith(("_TOKEN", "_KEY", "_APIKEY", "AUTHTOKEN"))
    words = [word.casefold() for word in _WORDS.findall(name)]
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token":
        return before not in _SPECIAL_TOKENS
    return last == "apikey" or (last == "key" and before in _SECRET_KEYS)


def environment_secrets() -> frozenset[str]:
    """Return the values of environment variables with secret-looking names, and the passwords of URLs in any variable,
    except very short ones."""
    named = {text for name, text in os.environ.items() if is_secret(name, text)}
    return frozenset(text for text in named.union(*map(url_secrets, os.environ.values())) if len(text) >= SHORTEST)


def url_secrets(text: str) -> set[str]:
    """Return the passwords of the URLs in a text, as written."""
    return {match["secret"] for match in _url_secret().finditer(text)} if "://" in text else set()


def mask_urls(text: str, *, in_place: bool = False) -> str:
    """Return a text with the passwords of URLs masked; `in_place` replaces each character by a star."""
    if "://" not in text:
        return text

    def masked(match: re.Match[str]) -> str:
        before = match[0][: match.start("secret") - match.start()]
        return f"{before}{'*' * len(match['secret']) if in_place else MASK}@"

    return _url_secret().sub(masked, text)


def _is_hidden(path: Path, scalar: ScalarNode, secret: Collection[Path]) -> bool:
    """Return whether a value is at or below a path in `secret` or a secret-looking key; null and empty text are not."""
    if scalar.value in (None, "") or not path:
        return False
    # The path check applies only to the value's own key.
    *above, last = path
    if isinstance(last, str) and is_secret(last, scalar.raw):
        return True
    if any(isinstance(name, str) and is_secret(name) for name in above):
        return True
    return bool(secret) and any(path[:size] in secret for size in range(1, len(path) + 1))


def secret_values(tree: MappingNode, secret: Collection[Path] = ()) -> frozenset[str]:
    """Return the values that `mask` hides."""
    secrets: set[str] = set()
    for path, scalar in scalars(tree):
        if _is_hidden(path, scalar, secret):
            secrets.add(scalar.raw)
        secrets |= url_secrets(scalar.raw)
    return frozenset(secrets)


def mask(tree: MappingNode, secret: Collection[Path] = ()) -> MappingNode:
    """Return `tree` with stars for values under secret-looking keys and at the paths in `secret`; null stays null."""
    return cast("MappingNode", _mask(tree, (), frozenset(secret)))


def _mask(node: Node, path: Path, secret: frozenset[Path]) -> Node:
    if isinstance(node, ScalarNode):
        shown = MASK if _is_hidden(path, node, secret) else mask_urls(node.raw)
        return node if shown == node.raw else ScalarNode(node.span, shown, shown, plain=False)
    if isinstance(node, SequenceNode):
        return SequenceNode(node.span, tuple([_mask(item, (*path, i), secret) for i, item in enumerate(node.items)]))
    entries = [Entry(entry.key, _mask(entry.value, (*path, entry.key.raw), secret)) for entry in node.entries]
    return MappingNode(node.span, tuple(entries))


# Every secret-looking name contains one of these; a text without any is not searched further.
_SECRET_WORD: Final = re.compile(
    f"{'|'.join((*_ALWAYS, 'token', 'key', *(f'_{end}' for end in _VARIABLE_ENDS)))}", re.IGNORECASE
)
# `name:` or `name=`, quoted or not, anywhere in a line.
_ASSIGNMENT: Final = re.compile(r"""(?<![\w.-])(?P<name>[\w.-]++)["']?[ \t]*+[:=]""")
_FLOW_END: Final = re.compile(r"[,}\]]")
# A reference without a default reveals nothing of the value.
_BARE_REFERENCE: Final = re.compile(r"""["']?\$\{(env:\w+|[^}:]*)\}["']?\s*(#.*)?\Z""")


def mask_text(text: str) -> str:
    """Return configuration text (lines of a file, an argument) with stars for secret values; errs on the side of
    hiding.

    Positions are preserved. A multi-line value is recognised by its indentation.
    """
    text = mask_urls(text, in_place=True)
    if not _SECRET_WORD.search(text):
        return text
    shown: list[str] = []
    # The column of the key of a multi-line secret, or None: deeper indented lines belong to its value.
    column: int | None = None
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if column is not None and (indent > column or not line.strip()):
            shown.append(_stars(line))
            continue
        masked, column = _mask_line(line)
        shown.append(masked)
    return "\n".join(shown)


_QUOTED: Final = re.compile("`[^`]+`")


def mask_message(text: str) -> str:
    """Return a message with masked passwords of URLs, and masked secrets in quotations such as `API_TOKEN=...`."""
    text = mask_urls(text)
    return _QUOTED.sub(lambda quoted: f"`{mask_text(quoted[0][1:-1])}`", text) if _SECRET_WORD.search(text) else text


def _mask_line(line: str) -> tuple[str, int | None]:
    """Return the line masked, and the column of a secret key whose value may continue in the next line."""
    shown = ""
    column: int | None = None
    depth = 0
    at = 0
    while (match := _ASSIGNMENT.search(line, at)) is not None:
        start = match.end()
        before = line[at:start]
        shown += before
        depth += sum(before.count(opening) for opening in "{[") - sum(before.count(closing) for closing in "}]")
        at = start
        end = _value_end(line, start, inside=depth > 0)
        value = line[start:end]
        if is_secret(match["name"], value.strip().strip("\"'")):
            at = end
            shown += value if _BARE_REFERENCE.match(value.strip()) else _stars(value)
            quoted = line[: match.start()].endswith(("'", '"'))
            column = match.start() - quoted if at == len(line) else None
    return shown + line[at:], column


def _value_end(line: str, start: int, *, inside: bool) -> int:
    """Return the end of the value at `start`: inside brackets the next comma or bracket, else the end of the line."""
    if not inside:
        return len(line)
    while line[start : start + 1].isspace():
        start += 1
    quote = line[start : start + 1]
    if quote in ('"', "'"):
        return line.find(quote, start + 1) + 1 or len(line)
    end = _FLOW_END.search(line, start)
    return end.start() if end else len(line)


def _stars(text: str) -> str:
    return re.sub(r"\S", "*", text)
