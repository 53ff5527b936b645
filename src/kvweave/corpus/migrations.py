"""The catalogue's schema as numbered steps. Add a step at the end; never edit one that shipped."""

import sqlite3
from collections.abc import Iterator

from kvweave.errors import CorpusError

MIGRATIONS: tuple[str, ...] = (
    # 1: sources → documents → chunks → vectors
    """
    CREATE TABLE sources (              -- one file, or one text handed over from Python
        source      TEXT PRIMARY KEY,
        fingerprint TEXT NOT NULL       -- of the bytes, written when all its documents are in
    ) WITHOUT ROWID;
    CREATE TABLE documents (
        document_id TEXT PRIMARY KEY,
        source      TEXT NOT NULL,
        title       TEXT NOT NULL,
        fingerprint TEXT NOT NULL,      -- of title and text
        num_chars   INTEGER NOT NULL,
        num_chunks  INTEGER NOT NULL,
        num_tokens  INTEGER NOT NULL,
        added_at    REAL NOT NULL       -- seconds since 1970
    ) WITHOUT ROWID;
    CREATE INDEX documents_by_source ON documents (source);
    CREATE TABLE chunks (
        vector_id   INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice: an index may lag behind
        chunk_id    TEXT NOT NULL UNIQUE,
        title       TEXT NOT NULL,
        text        TEXT NOT NULL,
        token_ids   BLOB NOT NULL,      -- little-endian uint32
        num_uses    INTEGER NOT NULL DEFAULT 0  -- rows of document_chunks; at 0 the chunk goes
    );
    CREATE TABLE document_chunks (
        document_id TEXT NOT NULL REFERENCES documents,
        ordinal     INTEGER NOT NULL,
        vector_id   INTEGER NOT NULL REFERENCES chunks,
        char_start  INTEGER NOT NULL,
        char_end    INTEGER NOT NULL,
        PRIMARY KEY (document_id, ordinal)
    ) WITHOUT ROWID;
    CREATE INDEX document_chunks_by_chunk ON document_chunks (vector_id);
    CREATE TRIGGER chunk_used AFTER INSERT ON document_chunks BEGIN
        UPDATE chunks SET num_uses = num_uses + 1 WHERE vector_id = new.vector_id;
    END;
    CREATE TRIGGER chunk_released AFTER DELETE ON document_chunks BEGIN
        UPDATE chunks SET num_uses = num_uses - 1 WHERE vector_id = old.vector_id;
    END;
    CREATE TABLE vectors (              -- may run ahead of chunks while a document is under way
        chunk_id    TEXT PRIMARY KEY,
        vector      BLOB NOT NULL       -- little-endian float32
    );
    CREATE TABLE removals (             -- what an index that lags behind must drop
        generation  INTEGER NOT NULL,
        vector_id   INTEGER NOT NULL,
        PRIMARY KEY (generation, vector_id)
    ) WITHOUT ROWID;
    CREATE TABLE state (generation INTEGER NOT NULL);  -- one row; grows with every change
    INSERT INTO state VALUES (0);
    """,
    # 2: words, for lexical search; follows chunks inside the same transaction
    """
    CREATE VIRTUAL TABLE words USING fts5 (
        text, content='chunks', content_rowid='vector_id', tokenize='porter unicode61'
    );
    CREATE TRIGGER chunk_words_added AFTER INSERT ON chunks BEGIN
        INSERT INTO words (rowid, text) VALUES (new.vector_id, new.text);
    END;
    CREATE TRIGGER chunk_words_removed AFTER DELETE ON chunks BEGIN
        INSERT INTO words (words, rowid, text) VALUES ('delete', old.vector_id, old.text);
    END;
    INSERT INTO words (words) VALUES ('rebuild');
    """,
    # 3: tells this catalogue from any other, so that an index of an older one is not taken for its
    """
    ALTER TABLE state ADD COLUMN uid TEXT NOT NULL DEFAULT '';
    UPDATE state SET uid = lower(hex(randomblob(16)));
    """,
    # 4: names what went, for those who keep KV of it; what went before has no name here
    """
    ALTER TABLE removals ADD COLUMN chunk_id TEXT;
    ALTER TABLE state ADD COLUMN kv_generation INTEGER NOT NULL DEFAULT 0;
    UPDATE state SET kv_generation = generation;  -- removals up to there have reached chunk KV
    """,
    # 5: when it went, so that the note of it can go one day; notes up to `pruned` have
    """
    ALTER TABLE removals ADD COLUMN removed_at REAL NOT NULL DEFAULT 0;  -- seconds since 1970
    UPDATE removals SET removed_at = CAST(strftime('%s', 'now') AS REAL);
    ALTER TABLE state ADD COLUMN pruned INTEGER NOT NULL DEFAULT 0;
    """,
    # 6: what a document's owner says of it; a value is a text or a number, as it was given
    """
    CREATE TABLE metadata (
        document_id TEXT NOT NULL REFERENCES documents,
        key         TEXT NOT NULL,
        value       NOT NULL,
        PRIMARY KEY (document_id, key)
    ) WITHOUT ROWID;
    CREATE INDEX metadata_by_value ON metadata (key, value);
    """,
)


def migrate(db: sqlite3.Connection) -> None:
    """Bring the schema up to date, each step in its own transaction. Safe to call twice.

    Also from several processes at once: one that waited for the lock looks at the version again.
    `db` must leave transactions to us (isolation_level None).
    """
    while _version(db) < len(MIGRATIONS):
        db.execute("BEGIN IMMEDIATE")
        try:
            version = _version(db)
            if version < len(MIGRATIONS):
                for statement in _statements(MIGRATIONS[version]):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {version + 1}")
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")


def _version(db: sqlite3.Connection) -> int:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise CorpusError(
            f"the catalogue has schema {version}, this kvweave knows {len(MIGRATIONS)}; "
            "use the newer kvweave that wrote it"
        )
    return int(version)


def _statements(script: str) -> Iterator[str]:
    """One by one: `executescript` would commit before it begins, and the lock would be gone."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    assert not statement.strip(), "a migration ends with a semicolon"
