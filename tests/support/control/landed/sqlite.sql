CREATE TABLE falaj_governed (
    model VARCHAR(120) NOT NULL,
    PRIMARY KEY (model)
);
CREATE TABLE falaj_verdicts (
    number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    verdict_id VARCHAR(64) NOT NULL,
    model VARCHAR(120) NOT NULL,
    use_case VARCHAR(120) NOT NULL,
    version INTEGER NOT NULL,
    verdict VARCHAR(20) NOT NULL,
    window_end DATETIME NOT NULL,
    evidence TEXT NOT NULL,
    policy TEXT NOT NULL,
    stored_at DATETIME NOT NULL,
    answered_at DATETIME,
    num_asked INTEGER NOT NULL,
    UNIQUE (verdict_id)
);
CREATE INDEX falaj_verdicts_of ON falaj_verdicts (model, use_case, answered_at);
CREATE TABLE falaj_episodes (
    episode_id VARCHAR(64) NOT NULL,
    model VARCHAR(120) NOT NULL,
    use_case VARCHAR(120) NOT NULL,
    version INTEGER NOT NULL,
    cause VARCHAR(20) NOT NULL,
    opened_by VARCHAR(64) NOT NULL,
    newest VARCHAR(64) NOT NULL,
    opened_at DATETIME NOT NULL,
    closed_at DATETIME,
    closed_by TEXT,
    PRIMARY KEY (episode_id),
    FOREIGN KEY(opened_by) REFERENCES falaj_verdicts (verdict_id),
    FOREIGN KEY(newest) REFERENCES falaj_verdicts (verdict_id)
);
CREATE UNIQUE INDEX falaj_one_open_episode ON falaj_episodes (model, use_case, cause) WHERE closed_at IS NULL;
CREATE TABLE falaj_claims (
    episode_id VARCHAR(64) NOT NULL,
    model VARCHAR(120) NOT NULL,
    use_case VARCHAR(120) NOT NULL,
    action VARCHAR(20) NOT NULL,
    verdict_id VARCHAR(64) NOT NULL,
    reason TEXT NOT NULL,
    state VARCHAR(20) NOT NULL,
    claimed_at DATETIME NOT NULL,
    claimed_by TEXT NOT NULL,
    kind VARCHAR(20),
    place TEXT,
    run_id VARCHAR(80),
    started_at DATETIME,
    ended_at DATETIME,
    run_state VARCHAR(40),
    run_seconds FLOAT,
    num_starts INTEGER NOT NULL,
    trouble TEXT,
    PRIMARY KEY (episode_id),
    FOREIGN KEY(episode_id) REFERENCES falaj_episodes (episode_id),
    FOREIGN KEY(verdict_id) REFERENCES falaj_verdicts (verdict_id)
);
CREATE INDEX falaj_claims_of ON falaj_claims (model, use_case, state);
CREATE TABLE falaj_decisions (
    number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    decided_at DATETIME NOT NULL,
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
CREATE INDEX falaj_decisions_of ON falaj_decisions (model, use_case, number);
CREATE TABLE falaj_claim_clocks (
    episode_id VARCHAR(64) NOT NULL,
    boot VARCHAR(64) NOT NULL,
    uptime_s FLOAT NOT NULL,
    PRIMARY KEY (episode_id),
    FOREIGN KEY(episode_id) REFERENCES falaj_claims (episode_id)
);
CREATE TABLE falaj_releases (
    release_id VARCHAR(64) NOT NULL,
    model VARCHAR(120) NOT NULL,
    stable VARCHAR(40) NOT NULL,
    candidate VARCHAR(40) NOT NULL,
    state VARCHAR(20) NOT NULL,
    step INTEGER NOT NULL,
    step_since DATETIME NOT NULL,
    opened_at DATETIME NOT NULL,
    opened_by TEXT NOT NULL,
    closed_at DATETIME,
    held_by TEXT NOT NULL,
    generation INTEGER NOT NULL,
    moved INTEGER NOT NULL,
    can_split BOOLEAN NOT NULL,
    config TEXT NOT NULL,
    PRIMARY KEY (release_id)
);
CREATE UNIQUE INDEX falaj_one_open_release ON falaj_releases (model) WHERE closed_at IS NULL;
CREATE TABLE falaj_release_entries (
    number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    release_id VARCHAR(64) NOT NULL,
    at DATETIME NOT NULL,
    actor TEXT NOT NULL,
    action VARCHAR(20) NOT NULL,
    rule VARCHAR(40) NOT NULL,
    reason TEXT NOT NULL,
    step INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    evidence TEXT,
    FOREIGN KEY(release_id) REFERENCES falaj_releases (release_id)
);
CREATE INDEX ix_falaj_release_entries_release_id ON falaj_release_entries (release_id);
CREATE TABLE falaj_release_periods (
    number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    release_id VARCHAR(64) NOT NULL,
    step INTEGER NOT NULL,
    since DATETIME NOT NULL,
    until DATETIME,
    candidate FLOAT NOT NULL,
    mirror FLOAT NOT NULL,
    sticky BOOLEAN NOT NULL,
    split BOOLEAN NOT NULL,
    FOREIGN KEY(release_id) REFERENCES falaj_releases (release_id)
);
CREATE INDEX ix_falaj_release_periods_release_id ON falaj_release_periods (release_id);
CREATE TABLE falaj_lease_state (
    id INTEGER NOT NULL,
    version BIGINT NOT NULL,
    last_token BIGINT NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE falaj_lease_units (
    unit VARCHAR(160) NOT NULL,
    part INTEGER NOT NULL,
    ticket BIGINT NOT NULL,
    PRIMARY KEY (unit, part)
);
CREATE INDEX ix_falaj_lease_units_ticket ON falaj_lease_units (ticket);
CREATE TABLE falaj_leases (
    ticket INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    state VARCHAR(10) NOT NULL,
    boot VARCHAR(64) NOT NULL,
    holder TEXT NOT NULL,
    host TEXT NOT NULL,
    process TEXT NOT NULL,
    mark VARCHAR(32) NOT NULL,
    priority INTEGER NOT NULL,
    due_s DOUBLE NOT NULL,
    request TEXT NOT NULL,
    devices TEXT NOT NULL,
    token BIGINT,
    lease TEXT,
    requested_s DOUBLE NOT NULL,
    granted_s DOUBLE,
    expires_s DOUBLE NOT NULL,
    deadline_s DOUBLE NOT NULL,
    ttl_s DOUBLE NOT NULL,
    grace_s DOUBLE NOT NULL,
    beat BIGINT NOT NULL,
    UNIQUE (token)
);
CREATE INDEX ix_falaj_leases_boot ON falaj_leases (boot);
