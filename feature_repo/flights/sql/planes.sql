-- Plane records: static facts from the civil register. The register has no history, so every
-- record counts as known from the first day of the data; see README, "Limits".
SELECT
    tailnum,
    TIMESTAMPTZ '2013-01-01 00:00:00+00' AS event_timestamp,
    TIMESTAMPTZ '2013-01-01 00:00:00+00' AS created,
    (2013 - year)::FLOAT AS age_years,
    seats::FLOAT AS seats,
    engines::FLOAT AS engines,
    manufacturer,
    engine AS engine_type,
FROM planes
