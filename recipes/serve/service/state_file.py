"""The state from which a later start continues: a folder that one server locks, and in it a database of sessions,
samplers, points of models, and requests.

The database is one SQLite file. Commits survive the process; if the machine dies, the file stays consistent, but may
lack the last commits.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rlinf_core import ConfigError
from rlinf_core.errors import RunError
from rlinf_core.foreign.files import BadFileError, read_json_object
from rlinf_core.runners.storage.durable import claimed, remove_tree, write_whole

_LOCK: Final = "lock"
_MODEL: Final = "model.json"


@contextmanager
def state_folder(folder: Path, model: Mapping[str, Any]) -> Generator[None]:
    """Lock a folder of state within the block.

    Args:
        folder: the folder, created if it does not exist.
        model: settings that must equal those of earlier starts.

    Raises:
        ConfigError: another server uses the folder, or it belongs to another model or an earlier version.
        RunError: the folder cannot be read or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _LOCK).touch()
    except OSError as error:
        raise _unusable(folder, error) from error
    with claimed(folder / _LOCK) as mine:
        if not mine:
            raise ConfigError(
                f"another service uses the state in `{folder}`", help="end it, or write another `server.state_dir`"
            )
        try:
            _check_model(folder / _MODEL, dict(model))
            _check_version(folder)
        except OSError as error:
            raise _unusable(folder, error) from error
        yield


def _check_version(folder: Path) -> None:
    earlier = next(folder.glob("sessions/*/journal"), None)
    if earlier is not None:
        raise ConfigError(
            f"`{earlier}` is of a session that an earlier version of this service has not ended",
            help=f"start that version and close its clients, or remove `{folder / 'sessions'}`: keys, and weights saved"
            " under a name, stay",
        )


def _unusable(folder: Path, error: OSError) -> RunError:
    return RunError(f"the state in `{folder}` cannot be read or written", why=error.strerror)


def _check_model(file: Path, model: dict[str, Any]) -> None:
    if not file.exists():
        write_whole(file, json.dumps(model))
        return
    try:
        before = read_json_object(file)
    except BadFileError as error:
        raise RunError(f"`{file}` {error.strerror}", help="write another `server.state_dir`") from None
    changed = [key for key, value in model.items() if before.get(key) != value]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"the state in `{file.parent}` is of another model: `{key}` was {before.get(key)}, and is {model[key]}",
            help="write the old value, or another `server.state_dir`",
        )


REQUESTS: Final = "requests.sqlite"
SESSIONS: Final = "sessions"
# The state of a model's request whose result was dropped, and which a later start repeats.
DROPPED: Final = "dropped"
_SESSION: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+")
_VERSION: Final = 1
_SCHEMA: Final = """
PRAGMA page_size = 16384;
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA wal_autocheckpoint = 1024;
CREATE TABLE IF NOT EXISTS sessions (session TEXT PRIMARY KEY, tenant TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samplers (sampler TEXT PRIMARY KEY, session TEXT NOT NULL, path TEXT, snapshot TEXT);
CREATE TABLE IF NOT EXISTS points (
    model TEXT PRIMARY KEY, session TEXT NOT NULL, number INTEGER NOT NULL, folder TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS requests (
    place INTEGER PRIMARY KEY,     -- in the order in which they came
    request TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    session TEXT NOT NULL,
    kind TEXT NOT NULL,
    owner TEXT NOT NULL,
    number INTEGER NOT NULL,
    digest BLOB NOT NULL,
    route TEXT NOT NULL,
    fields TEXT NOT NULL,
    answer TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'open',
    drop_after REAL,               -- seconds since 1970; NULL: open or dropped
    size INTEGER NOT NULL DEFAULT 0,
    outcome BLOB NOT NULL DEFAULT x'',
    UNIQUE (kind, owner, number)
);
-- Apart, for SQLite writes a row anew as a whole.
CREATE TABLE IF NOT EXISTS bodies (request TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS kept ON requests (drop_after) WHERE drop_after IS NOT NULL;
"""


class StateFile:
    """The database, and a folder for each session.

    Args:
        folder: the parent folder of both.

    Raises:
        RunError: the file cannot be read or written, or is of another version.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._sessions = folder / REQUESTS, folder / SESSIONS
        with self._used("read or written"):
            folder.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self._file)
            self._begin()

    def _begin(self) -> None:
        version = self.rows("PRAGMA user_version")[0][0]
        if version not in (0, _VERSION):
            raise RunError(
                f"`{self._file}` is of another version of this service",
                help="start that version, or write another `server.state_dir`",
            )
        self._database.executescript(f"{_SCHEMA}PRAGMA user_version = {_VERSION};")
        with self._database as database:
            for table in ("samplers", "points", "requests"):
                database.execute(f"DELETE FROM {table} WHERE session NOT IN (SELECT session FROM sessions)")
            database.execute("DELETE FROM bodies WHERE request NOT IN (SELECT request FROM requests)")
        there = {session for session, _ in self.sessions()}
        for path in self._sessions.iterdir() if self._sessions.is_dir() else ():
            # The session's end or beginning was interrupted.
            if _SESSION.fullmatch(path.name) and path.name not in there:
                remove_tree(path)

    @contextmanager
    def _used(self, verb: str) -> Generator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise RunError(f"the requests in `{self._file}` cannot be {verb}", why=str(error)) from error

    @contextmanager
    def writing(self) -> Generator[sqlite3.Connection]:
        """Commit everything within the block, or nothing.

        Raises:
            RunError: the file cannot be written.
        """
        with self._used("written"), self._database as database:
            yield database

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query.

        Raises:
            RunError: the file cannot be read.
        """
        with self._used("read"):
            return self._database.execute(query, values).fetchall()

    # Sessions

    def folder(self, session_id: str) -> Path:
        """Return the folder of a session, which is removed with it."""
        return self._sessions / session_id

    def begin_session(self, session_id: str, tenant: str) -> None:
        """Store a session.

        Raises:
            RunError: the file cannot be written.
        """
        with self.writing() as database:
            self.folder(session_id).mkdir(parents=True, exist_ok=True)
            database.execute("INSERT INTO sessions VALUES (?, ?)", (session_id, tenant))

    def sessions(self) -> list[tuple[str, str]]:
        """Return the ids of all sessions, each with its tenant."""
        return [(session, tenant) for session, tenant in self.rows("SELECT * FROM sessions ORDER BY session")]

    def end_session(self, session_id: str) -> None:
        """Remove a session and its folder; results of its requests are kept like others.

        Raises:
            RunError: the file cannot be written.
        """
        with self.writing() as database:
            for table in ("sessions", "samplers", "points"):
                database.execute(f"DELETE FROM {table} WHERE session = ?", (session_id,))
            ended = "WHERE request IN (SELECT request FROM requests WHERE session = ?)"
            database.execute(f"DELETE FROM bodies {ended}", (session_id,))
            database.execute("DELETE FROM requests WHERE session = ? AND state = ?", (session_id, DROPPED))
        remove_tree(self.folder(session_id))

    def keep_sampler(self, sampler_id: str, session_id: str, path: str | None, snapshot: str | None) -> None:
        """Store a sampler, with the path of its weights, or the name of their folder in the session's folder.

        Raises:
            RunError: the file cannot be written.
        """
        with self.writing() as database:
            values = (sampler_id, session_id, path, snapshot)
            database.execute("INSERT OR REPLACE INTO samplers VALUES (?, ?, ?, ?)", values)

    def drop_sampler(self, sampler_id: str) -> None:
        """Remove a sampler."""
        with self.writing() as database:
            database.execute("DELETE FROM samplers WHERE sampler = ?", (sampler_id,))

    def samplers(self, session_id: str) -> list[tuple[str, str | None, str | None]]:
        """Return id, path and snapshot of the samplers of a session; see `keep_sampler`."""
        query = "SELECT sampler, path, snapshot FROM samplers WHERE session = ?"
        return [(sampler, path, snapshot) for sampler, path, snapshot in self.rows(query, session_id)]

    # Points of models

    def keep_point(self, model_id: str, session_id: str, number: int, folder: str) -> None:
        """Store the point of a model after a request, in a folder of the session, and drop what earlier requests
        needed.

        Raises:
            RunError: the file cannot be written.
        """
        until = (model_id, number)
        with self.writing() as database:
            values = (model_id, session_id, number, folder)
            database.execute("INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?)", values)
            before = "WHERE kind = 'request' AND owner = ? AND number <= ?"
            database.execute(f"DELETE FROM bodies WHERE request IN (SELECT request FROM requests {before})", until)
            database.execute(f"DELETE FROM requests {before} AND state = '{DROPPED}'", until)

    def points(self, session_id: str) -> dict[str, tuple[int, str]]:
        """Return the points of a session's models: number of the request and folder, by model."""
        query = "SELECT model, number, folder FROM points WHERE session = ?"
        return {model: (number, folder) for model, number, folder in self.rows(query, session_id)}

    def body_bytes(self, model_id: str) -> int:
        """Return the bytes of bodies kept to repeat a model's requests."""
        query = (
            "SELECT total(length(body)) FROM requests JOIN bodies USING (request) WHERE kind = 'request' AND owner = ?"
        )
        return int(self.rows(query, model_id)[0][0])

    def close(self) -> None:
        """Close the file, so that another service may open it."""
        self._database.close()

    def shrink(self) -> None:
        """Free the disk space of dropped data."""
        with self._used("written"):
            self._database.execute("PRAGMA incremental_vacuum").fetchall()
