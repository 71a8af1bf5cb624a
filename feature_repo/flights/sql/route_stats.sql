-- Routes: how the flights between two airports that had already landed did, for every UTC day of
-- the window. A row at day d counts landings in (d - horizon, d]; a route without any in 28 days
-- has no row.
WITH landings AS (
    SELECT
        origin,
        dest,
        date_trunc('day', landed_at - INTERVAL 1 MICROSECOND) + INTERVAL 1 DAY AS known_at,
        count(*) AS landed,
        sum(arr_delay) AS arr_delay,
        count(*) FILTER (arr_delay > 15) AS late,
    FROM flight_times
    WHERE landed_at > getvariable('window_start') - INTERVAL 29 DAYS
      AND landed_at < getvariable('window_end')
    GROUP BY ALL
),

days AS (
    SELECT origin, dest, known_at
    FROM (SELECT DISTINCT origin, dest FROM landings)
    CROSS JOIN (
        SELECT unnest(generate_series(
            date_trunc('day', getvariable('window_start')) - INTERVAL 28 DAYS,
            getvariable('window_end') - INTERVAL 1 MICROSECOND,
            INTERVAL 1 DAY
        )) AS known_at
    )
),

rolling AS (
    SELECT
        origin,
        dest,
        known_at,
        coalesce(sum(landed) OVER last_7d, 0) AS landed_7d,
        coalesce(sum(arr_delay) OVER last_7d, 0) AS arr_delay_7d,
        coalesce(sum(late) OVER last_7d, 0) AS late_7d,
        coalesce(sum(landed) OVER last_28d, 0) AS landed_28d,
        coalesce(sum(arr_delay) OVER last_28d, 0) AS arr_delay_28d,
        coalesce(sum(late) OVER last_28d, 0) AS late_28d,
    FROM days
    LEFT JOIN landings USING (origin, dest, known_at)
    WINDOW
        last_7d AS (PARTITION BY origin, dest ORDER BY known_at ROWS 6 PRECEDING),
        last_28d AS (PARTITION BY origin, dest ORDER BY known_at ROWS 27 PRECEDING)
)

SELECT
    origin,
    dest,
    known_at AS event_timestamp,
    known_at + INTERVAL 5 MINUTES AS created,
    landed_7d::FLOAT AS landed_7d,
    (arr_delay_7d / nullif(landed_7d, 0))::FLOAT AS arr_delay_7d,
    (late_7d / nullif(landed_7d, 0))::FLOAT AS late_rate_7d,
    landed_28d::FLOAT AS landed_28d,
    (arr_delay_28d / nullif(landed_28d, 0))::FLOAT AS arr_delay_28d,
    (late_28d / nullif(landed_28d, 0))::FLOAT AS late_rate_28d,
FROM rolling
WHERE known_at >= getvariable('window_start')
  AND known_at < getvariable('window_end')
  AND landed_28d > 0
