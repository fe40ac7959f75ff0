"""The tables of a run's journal, `run.db`, and their version.

Only the SQL: `asyncrl.journal` writes through it (the hub is the one writer), `asyncrl.metrics.reader` and
every viewer read it. Inserts are idempotent: primary keys are ids and sequence numbers, so a message that
is handled twice changes nothing. Times are seconds since the epoch (`time`); JSON columns are named so.
"""

SCHEMA_VERSION = 4

TABLES = """
CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
-- keys: schema, name, config_json, created, status (running | finished | stopped | failed), reason,
--   checkpoints (JSON: steps of those that are kept), reclaimed (last step whose tokens were removed)

CREATE TABLE IF NOT EXISTS task (
    task_index INTEGER PRIMARY KEY,          -- order of admission
    drawn INTEGER NOT NULL,                  -- its index in the training split; a curriculum skips some
    task_id TEXT NOT NULL,
    task_json TEXT NOT NULL                  -- a messages.Task
);

CREATE TABLE IF NOT EXISTS grp (
    group_id INTEGER PRIMARY KEY,
    task_index INTEGER NOT NULL,
    state TEXT NOT NULL,                     -- running | complete | filtered | retired (all uses trained)
    reason TEXT NOT NULL DEFAULT '',         -- why it was filtered
    uses INTEGER NOT NULL DEFAULT 0,         -- batches it was sealed into
    needs_version INTEGER NOT NULL,          -- only generators at this version or a newer one may sample it
    admitted REAL NOT NULL
);

CREATE TABLE IF NOT EXISTS episode (
    episode_id INTEGER PRIMARY KEY,
    group_id INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    greedy INTEGER NOT NULL DEFAULT 0,       -- 1: sampled at temperature 0, a baseline of its group, in no row
    state TEXT NOT NULL,                     -- queued | leased | done | trained | filtered | failed
    reason TEXT NOT NULL DEFAULT '',         -- why filtered or failed
    status TEXT NOT NULL DEFAULT '',         -- a messages.EpisodeStatus, once ended
    reward REAL,
    rewards_json TEXT NOT NULL DEFAULT '{}', -- parts of reward by name, unweighted: environment, functions, model
    turns INTEGER NOT NULL DEFAULT 0,
    info_json TEXT NOT NULL DEFAULT '{}',    -- named counts: tool_calls, forks, the environment's own
    next_seq INTEGER NOT NULL DEFAULT 0,     -- set at the end; before, it is the number of chunks
    length INTEGER NOT NULL DEFAULT 0,       -- tokens; set at the end
    sampled INTEGER NOT NULL DEFAULT 0,      -- sampled tokens; set at the end
    min_version INTEGER NOT NULL DEFAULT -1, -- oldest and newest version that sampled a token; set at the end
    max_version INTEGER NOT NULL DEFAULT -1,
    ended REAL
);
CREATE INDEX IF NOT EXISTS episode_group ON episode (group_id);
CREATE INDEX IF NOT EXISTS episode_state ON episode (state, reason);

-- Not WITHOUT ROWID: episodes grow side by side, and appending rows with a small index beside them costs
-- a third to a half of keeping the blobs themselves in key order (measured, 32 to 512 tokens a chunk).
CREATE TABLE IF NOT EXISTS chunk (
    episode_id INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    n INTEGER NOT NULL,
    version INTEGER NOT NULL,
    sampled INTEGER NOT NULL,                -- 1: sampled by the policy, 0: observed
    fork INTEGER NOT NULL,                   -- 1: a new branch of the episode begins with it
    tokens BLOB NOT NULL,                    -- int32, little-endian
    logprobs BLOB NOT NULL,                  -- float32, little-endian; empty for observed tokens
    crc INTEGER NOT NULL,                    -- CRC-32 of both: SQLite does not notice a changed blob
    PRIMARY KEY (episode_id, seq)
);

-- What environments answered, of episodes of more than one turn: they continue elsewhere from it.
CREATE TABLE IF NOT EXISTS turn (
    episode_id INTEGER NOT NULL,
    turn INTEGER NOT NULL,                   -- 0: its reset
    turn_json TEXT NOT NULL,                 -- a messages.Turn without its snapshot
    snapshot BLOB,                           -- state of the environment after it; of the last one only
    PRIMARY KEY (episode_id, turn)
);

CREATE TABLE IF NOT EXISTS lease (
    lease_id INTEGER PRIMARY KEY,
    episode_id INTEGER NOT NULL,
    generator TEXT NOT NULL,
    granted REAL NOT NULL,
    state TEXT NOT NULL                      -- active | done | lapsed
);
CREATE INDEX IF NOT EXISTS lease_active ON lease (state) WHERE state = 'active';

CREATE TABLE IF NOT EXISTS batch (
    batch_id INTEGER PRIMARY KEY,            -- equal to the learner step that trains it
    group_ids_json TEXT NOT NULL,            -- in order
    episode_ids_json TEXT NOT NULL,          -- in order; the order that `plan_json` indexes
    plan_json TEXT NOT NULL,                 -- [rank][row][index]
    seed INTEGER NOT NULL,
    sealed REAL NOT NULL
);

CREATE TABLE IF NOT EXISTS step (
    step INTEGER PRIMARY KEY,
    batch_id INTEGER NOT NULL,
    ended REAL NOT NULL,
    metrics_json TEXT NOT NULL,
    digest TEXT NOT NULL                     -- fingerprint of the learner's state after it, see StepDone
);

CREATE TABLE IF NOT EXISTS version (
    version INTEGER PRIMARY KEY,
    published REAL NOT NULL,
    seconds REAL NOT NULL,                   -- broadcast time
    nbytes INTEGER NOT NULL
);

CREATE TABLE IF NOT EXISTS metric (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    step INTEGER NOT NULL,                   -- last step done at that time
    source TEXT NOT NULL,                    -- hub | learner | generator-0 | ...
    metrics_json TEXT NOT NULL
);

CREATE TABLE IF NOT EXISTS event (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    source TEXT NOT NULL,
    what TEXT NOT NULL,                      -- started, died, lapsed, checkpoint, refused, not_finite, ...
    detail TEXT NOT NULL DEFAULT ''
);
"""
