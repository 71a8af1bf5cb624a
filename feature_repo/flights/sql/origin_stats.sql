-- Origins: how the flights out of an airport that had already landed did, for every hour of the window.
-- A row at hour h counts landings in (h - horizon, h]; keys without any in 24 hours have no row.
WITH landings AS (
    SELECT
        origin,
        date_trunc('hour', landed_at - INTERVAL 1 MICROSECOND) + INTERVAL 1 HOUR AS known_at,
        count(*) AS landed,
        sum(arr_delay) AS arr_delay,
        sum(dep_delay) AS dep_delay,
        count(*) FILTER (arr_delay > 15) AS late,
    FROM flight_times
    WHERE landed_at > getvariable('window_start') - INTERVAL 24 HOURS
      AND landed_at < getvariable('window_end')
    GROUP BY ALL
),

hours AS (
    SELECT origin, known_at
    FROM (SELECT DISTINCT origin FROM landings)
    CROSS JOIN (
        SELECT unnest(generate_series(
            date_trunc('hour', getvariable('window_start')) - INTERVAL 24 HOURS,
            getvariable('window_end') - INTERVAL 1 MICROSECOND,
            INTERVAL 1 HOUR
        )) AS known_at
    )
),

rolling AS (
    SELECT
        origin,
        known_at,
        coalesce(sum(landed) OVER last_1h, 0) AS landed_1h,
        coalesce(sum(arr_delay) OVER last_1h, 0) AS arr_delay_1h,
        coalesce(sum(dep_delay) OVER last_1h, 0) AS dep_delay_1h,
        coalesce(sum(late) OVER last_1h, 0) AS late_1h,
        coalesce(sum(landed) OVER last_3h, 0) AS landed_3h,
        coalesce(sum(arr_delay) OVER last_3h, 0) AS arr_delay_3h,
        coalesce(sum(dep_delay) OVER last_3h, 0) AS dep_delay_3h,
        coalesce(sum(late) OVER last_3h, 0) AS late_3h,
        coalesce(sum(landed) OVER last_6h, 0) AS landed_6h,
        coalesce(sum(arr_delay) OVER last_6h, 0) AS arr_delay_6h,
        coalesce(sum(dep_delay) OVER last_6h, 0) AS dep_delay_6h,
        coalesce(sum(late) OVER last_6h, 0) AS late_6h,
        coalesce(sum(landed) OVER last_24h, 0) AS landed_24h,
        coalesce(sum(arr_delay) OVER last_24h, 0) AS arr_delay_24h,
        coalesce(sum(dep_delay) OVER last_24h, 0) AS dep_delay_24h,
        coalesce(sum(late) OVER last_24h, 0) AS late_24h,
    FROM hours
    LEFT JOIN landings USING (origin, known_at)
    WINDOW
        last_1h AS (PARTITION BY origin ORDER BY known_at ROWS 0 PRECEDING),
        last_3h AS (PARTITION BY origin ORDER BY known_at ROWS 2 PRECEDING),
        last_6h AS (PARTITION BY origin ORDER BY known_at ROWS 5 PRECEDING),
        last_24h AS (PARTITION BY origin ORDER BY known_at ROWS 23 PRECEDING)
)

SELECT
    origin,
    known_at AS event_timestamp,
    -- Landings of the last minutes reach the store with the pipeline's lag.
    known_at + INTERVAL 5 MINUTES AS created,
    landed_1h::FLOAT AS landed_1h,
    (arr_delay_1h / nullif(landed_1h, 0))::FLOAT AS arr_delay_1h,
    (dep_delay_1h / nullif(landed_1h, 0))::FLOAT AS dep_delay_1h,
    (late_1h / nullif(landed_1h, 0))::FLOAT AS late_rate_1h,
    landed_3h::FLOAT AS landed_3h,
    (arr_delay_3h / nullif(landed_3h, 0))::FLOAT AS arr_delay_3h,
    (dep_delay_3h / nullif(landed_3h, 0))::FLOAT AS dep_delay_3h,
    (late_3h / nullif(landed_3h, 0))::FLOAT AS late_rate_3h,
    landed_6h::FLOAT AS landed_6h,
    (arr_delay_6h / nullif(landed_6h, 0))::FLOAT AS arr_delay_6h,
    (dep_delay_6h / nullif(landed_6h, 0))::FLOAT AS dep_delay_6h,
    (late_6h / nullif(landed_6h, 0))::FLOAT AS late_rate_6h,
    landed_24h::FLOAT AS landed_24h,
    (arr_delay_24h / nullif(landed_24h, 0))::FLOAT AS arr_delay_24h,
    (dep_delay_24h / nullif(landed_24h, 0))::FLOAT AS dep_delay_24h,
    (late_24h / nullif(landed_24h, 0))::FLOAT AS late_rate_24h,
FROM rolling
WHERE known_at >= getvariable('window_start')
  AND known_at < getvariable('window_end')
  AND landed_24h > 0
