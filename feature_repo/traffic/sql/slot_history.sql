-- Hours of the week: what the same hour was like in the weeks before, a row a count.
WITH history AS (
    SELECT
        station,
        slot,
        counted_at,
        volume,
        lag(volume) OVER weeks AS volume_before,
        avg(volume) OVER last_weeks AS volume_4w,
        min(volume) OVER last_weeks AS lowest_4w,
        max(volume) OVER last_weeks AS highest_4w,
    FROM hours
    WHERE counted_at >= getvariable('window_start') - INTERVAL 695 HOURS
      AND counted_at < getvariable('window_end')
    WINDOW
        weeks AS (PARTITION BY station, slot ORDER BY counted_at),
        last_weeks AS (PARTITION BY station, slot ORDER BY counted_at
            RANGE BETWEEN INTERVAL 22 DAYS PRECEDING AND CURRENT ROW)
)

SELECT
    station,
    slot,
    counted_at AS event_timestamp,
    counted_at + INTERVAL 5 MINUTES AS created,
    volume::FLOAT AS volume_last,
    volume_before::FLOAT AS volume_before,
    volume_4w::FLOAT AS volume_4w,
    lowest_4w::FLOAT AS lowest_4w,
    highest_4w::FLOAT AS highest_4w,
FROM history
WHERE counted_at >= getvariable('window_start')
