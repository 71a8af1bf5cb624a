-- How the flights of a carrier, out of an airport or to one (`key`) that had already landed did, for
-- every hour of the window. A row at hour h counts landings in (h - horizon, h]; keys without any
-- in the longest of the `horizons` have no row. The values of the parameters are in use_case.yaml.
WITH landings AS (
    SELECT
        ${key},
        date_trunc('hour', landed_at - INTERVAL 1 MICROSECOND) + INTERVAL 1 HOUR AS known_at,
        count(*) AS landed,
        sum(arr_delay) AS arr_delay,
        sum(dep_delay) AS dep_delay,
        count(*) FILTER (arr_delay > 15) AS late,
    FROM flight_times
    WHERE landed_at > getvariable('window_start') - INTERVAL ${reach}
      AND landed_at < getvariable('window_end')
    GROUP BY ALL
),

hours AS (
    SELECT ${key}, known_at
    FROM (SELECT DISTINCT ${key} FROM landings)
    CROSS JOIN (
        SELECT unnest(generate_series(
            date_trunc('hour', getvariable('window_start')) - INTERVAL ${reach},
            getvariable('window_end') - INTERVAL 1 MICROSECOND,
            INTERVAL 1 HOUR
        )) AS known_at
    )
),

rolling AS (
    SELECT
        ${key},
        known_at,
        struct_pack(n := sum(landed) OVER last_1h, arr := sum(arr_delay) OVER last_1h,
            dep := sum(dep_delay) OVER last_1h, late := sum(late) OVER last_1h) AS h1,
        struct_pack(n := sum(landed) OVER last_3h, arr := sum(arr_delay) OVER last_3h,
            dep := sum(dep_delay) OVER last_3h, late := sum(late) OVER last_3h) AS h3,
        struct_pack(n := sum(landed) OVER last_6h, arr := sum(arr_delay) OVER last_6h,
            dep := sum(dep_delay) OVER last_6h, late := sum(late) OVER last_6h) AS h6,
        struct_pack(n := sum(landed) OVER last_24h, arr := sum(arr_delay) OVER last_24h,
            dep := sum(dep_delay) OVER last_24h, late := sum(late) OVER last_24h) AS h24,
        struct_pack(n := sum(landed) OVER last_7d, arr := sum(arr_delay) OVER last_7d,
            dep := sum(dep_delay) OVER last_7d, late := sum(late) OVER last_7d) AS d7,
    FROM hours
    LEFT JOIN landings USING (${key}, known_at)
    WINDOW
        last_1h AS (PARTITION BY ${key} ORDER BY known_at ROWS 0 PRECEDING),
        last_3h AS (PARTITION BY ${key} ORDER BY known_at ROWS 2 PRECEDING),
        last_6h AS (PARTITION BY ${key} ORDER BY known_at ROWS 5 PRECEDING),
        last_24h AS (PARTITION BY ${key} ORDER BY known_at ROWS 23 PRECEDING),
        last_7d AS (PARTITION BY ${key} ORDER BY known_at ROWS 167 PRECEDING)
),

rates AS (
    SELECT
        ${key},
        known_at,
        coalesce(h1.n, 0)::FLOAT AS landed_1h,
        (h1.arr / nullif(h1.n, 0))::FLOAT AS arr_delay_1h,
        (h1.dep / nullif(h1.n, 0))::FLOAT AS dep_delay_1h,
        (h1.late / nullif(h1.n, 0))::FLOAT AS late_rate_1h,
        coalesce(h3.n, 0)::FLOAT AS landed_3h,
        (h3.arr / nullif(h3.n, 0))::FLOAT AS arr_delay_3h,
        (h3.dep / nullif(h3.n, 0))::FLOAT AS dep_delay_3h,
        (h3.late / nullif(h3.n, 0))::FLOAT AS late_rate_3h,
        coalesce(h6.n, 0)::FLOAT AS landed_6h,
        (h6.arr / nullif(h6.n, 0))::FLOAT AS arr_delay_6h,
        (h6.dep / nullif(h6.n, 0))::FLOAT AS dep_delay_6h,
        (h6.late / nullif(h6.n, 0))::FLOAT AS late_rate_6h,
        coalesce(h24.n, 0)::FLOAT AS landed_24h,
        (h24.arr / nullif(h24.n, 0))::FLOAT AS arr_delay_24h,
        (h24.dep / nullif(h24.n, 0))::FLOAT AS dep_delay_24h,
        (h24.late / nullif(h24.n, 0))::FLOAT AS late_rate_24h,
        coalesce(d7.n, 0)::FLOAT AS landed_7d,
        (d7.arr / nullif(d7.n, 0))::FLOAT AS arr_delay_7d,
        (d7.dep / nullif(d7.n, 0))::FLOAT AS dep_delay_7d,
        (d7.late / nullif(d7.n, 0))::FLOAT AS late_rate_7d,
    FROM rolling
)

SELECT
    ${key},
    known_at AS event_timestamp,
    -- Landings of the last minutes reach the store with the pipeline's lag.
    known_at + INTERVAL 5 MINUTES AS created,
    COLUMNS('_(${horizons})$'),
FROM rates
WHERE known_at >= getvariable('window_start')
  AND known_at < getvariable('window_end')
  AND landed_${longest} > 0
