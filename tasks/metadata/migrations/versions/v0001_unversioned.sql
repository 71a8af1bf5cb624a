-- The tables as they were before versions were counted. Each part of the program made its own ones,
-- so a database of that time may lack some. Braces are filled in by v0001_unversioned.py.
CREATE TABLE IF NOT EXISTS falaj_governed (
    model VARCHAR(120) NOT NULL,
    PRIMARY KEY (model)
);
CREATE TABLE IF NOT EXISTS falaj_verdicts (
    number {number},
    verdict_id VARCHAR(64) NOT NULL,
    model VARCHAR(120) NOT NULL,
    use_case VARCHAR(120) NOT NULL,
    version INTEGER NOT NULL,
    verdict VARCHAR(20) NOT NULL,
    window_end {moment} NOT NULL,
    evidence TEXT NOT NULL,
    policy TEXT NOT NULL,
    stored_at {moment} NOT NULL,
    answered_at {moment},
    num_asked INTEGER NOT NULL,
    UNIQUE (verdict_id)
);
CREATE INDEX IF NOT EXISTS falaj_verdicts_of ON falaj_verdicts (model, use_case, answered_at);
CREATE TABLE IF NOT EXISTS falaj_episodes (
    episode_id VARCHAR(64) NOT NULL,
    model VARCHAR(120) NOT NULL,
    use_case VARCHAR(120) NOT NULL,
    version INTEGER NOT NULL,
    cause VARCHAR(20) NOT NULL,
    opened_by VARCHAR(64) NOT NULL,
    newest VARCHAR(64) NOT NULL,
    opened_at {moment} NOT NULL,
    closed_at {moment},
    closed_by TEXT,
    PRIMARY KEY (episode_id),
    FOREIGN KEY(opened_by) REFERENCES falaj_verdicts (verdict_id),
    FOREIGN KEY(newest) REFERENCES falaj_verdicts (verdict_id)
);
CREATE UNIQUE INDEX IF NOT EXISTS falaj_one_open_episode ON falaj_episodes (model, use_case, cause) WHERE closed_at IS NULL;
CREATE TABLE IF NOT EXISTS falaj_claims (
    episode_id VARCHAR(64) NOT NULL,
    model VARCHAR(120) NOT NULL,
    use_case VARCHAR(120) NOT NULL,
    action VARCHAR(20) NOT NULL,
    verdict_id VARCHAR(64) NOT NULL,
    reason TEXT NOT NULL,
    state VARCHAR(20) NOT NULL,
    claimed_at {moment} NOT NULL,
    claimed_by TEXT NOT NULL,
    kind VARCHAR(20),
    place TEXT,
    run_id VARCHAR(80),
    started_at {moment},
    ended_at {moment},
    run_state VARCHAR(40),
    run_seconds FLOAT,
    num_starts INTEGER NOT NULL,
    trouble TEXT,
    PRIMARY KEY (episode_id),
    FOREIGN KEY(episode_id) REFERENCES falaj_episodes (episode_id),
    FOREIGN KEY(verdict_id) REFERENCES falaj_verdicts (verdict_id)
);
CREATE INDEX IF NOT EXISTS falaj_claims_of ON falaj_claims (model, use_case, state);
CREATE TABLE IF NOT EXISTS falaj_decisions (
    number {number},
    decided_at {moment} NOT NULL,
    model VARCHAR(120) NOT NULL,
    use_case VARCHAR(120) NOT NULL,
    verdict_id VARCHAR(64) NOT NULL,
    episode_id VARCHAR(64),
    cause VARCHAR(20),
    action VARCHAR(20) NOT NULL,
    carried_out_as VARCHAR(20),
    rule INTEGER NOT NULL,
    outcome VARCHAR(20) NOT NULL,
    reason TEXT NOT NULL,
    actor TEXT NOT NULL,
    FOREIGN KEY(verdict_id) REFERENCES falaj_verdicts (verdict_id),
    FOREIGN KEY(episode_id) REFERENCES falaj_episodes (episode_id)
);
CREATE INDEX IF NOT EXISTS falaj_decisions_of ON falaj_decisions (model, use_case, number);
CREATE TABLE IF NOT EXISTS falaj_claim_clocks (
    episode_id VARCHAR(64) NOT NULL,
    boot VARCHAR(64) NOT NULL,
    uptime_s FLOAT NOT NULL,
    PRIMARY KEY (episode_id),
    FOREIGN KEY(episode_id) REFERENCES falaj_claims (episode_id)
);
CREATE TABLE IF NOT EXISTS falaj_releases (
    release_id VARCHAR(64) NOT NULL,
    model VARCHAR(120) NOT NULL,
    stable VARCHAR(40) NOT NULL,
    candidate VARCHAR(40) NOT NULL,
    state VARCHAR(20) NOT NULL,
    step INTEGER NOT NULL,
    step_since {moment} NOT NULL,
    opened_at {moment} NOT NULL,
    opened_by TEXT NOT NULL,
    closed_at {moment},
    held_by TEXT NOT NULL,
    generation INTEGER NOT NULL,
    moved INTEGER NOT NULL,
    can_split BOOLEAN NOT NULL,
    config TEXT NOT NULL,
    PRIMARY KEY (release_id)
);
CREATE UNIQUE INDEX IF NOT EXISTS falaj_one_open_release ON falaj_releases (model) WHERE closed_at IS NULL;
CREATE TABLE IF NOT EXISTS falaj_release_entries (
    number {number},
    release_id VARCHAR(64) NOT NULL,
    at {moment} NOT NULL,
    actor TEXT NOT NULL,
    action VARCHAR(20) NOT NULL,
    rule VARCHAR(40) NOT NULL,
    reason TEXT NOT NULL,
    step INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    evidence TEXT,
    FOREIGN KEY(release_id) REFERENCES falaj_releases (release_id)
);
CREATE INDEX IF NOT EXISTS ix_falaj_release_entries_release_id ON falaj_release_entries (release_id);
CREATE TABLE IF NOT EXISTS falaj_release_periods (
    number {number},
    release_id VARCHAR(64) NOT NULL,
    step INTEGER NOT NULL,
    since {moment} NOT NULL,
    until {moment},
    candidate FLOAT NOT NULL,
    mirror FLOAT NOT NULL,
    sticky BOOLEAN NOT NULL,
    split BOOLEAN NOT NULL,
    FOREIGN KEY(release_id) REFERENCES falaj_releases (release_id)
);
CREATE INDEX IF NOT EXISTS ix_falaj_release_periods_release_id ON falaj_release_periods (release_id);
CREATE TABLE IF NOT EXISTS falaj_lease_state (
    id INTEGER NOT NULL,
    version BIGINT NOT NULL,
    last_token BIGINT NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE IF NOT EXISTS falaj_lease_units (
    unit VARCHAR(160) NOT NULL,
    part INTEGER NOT NULL,
    ticket BIGINT NOT NULL,
    PRIMARY KEY (unit, part)
);
CREATE INDEX IF NOT EXISTS ix_falaj_lease_units_ticket ON falaj_lease_units (ticket);
CREATE TABLE IF NOT EXISTS falaj_leases (
    ticket {number},
    state VARCHAR(10) NOT NULL,
    boot VARCHAR(64) NOT NULL,
    holder TEXT NOT NULL,
    host TEXT NOT NULL,
    process TEXT NOT NULL,
    mark VARCHAR(32) NOT NULL,
    priority INTEGER NOT NULL,
    due_s {double} NOT NULL,
    request TEXT NOT NULL,
    devices TEXT NOT NULL,
    token BIGINT,
    lease TEXT,
    requested_s {double} NOT NULL,
    granted_s {double},
    expires_s {double} NOT NULL,
    deadline_s {double} NOT NULL,
    ttl_s {double} NOT NULL,
    grace_s {double} NOT NULL,
    beat BIGINT NOT NULL,
    UNIQUE (token)
);
CREATE INDEX IF NOT EXISTS ix_falaj_leases_boot ON falaj_leases (boot);
INSERT INTO falaj_lease_state (id, version, last_token)
SELECT 1, 0, 0 WHERE NOT EXISTS (SELECT 1 FROM falaj_lease_state);
