-- Planes: what each plane's latest landings were like, a row a landing. Two landings of one plane
-- at the same minute cannot be ordered by time, so the scheduled departure decides.
WITH landings AS (
    SELECT
        tailnum,
        landed_at,
        scheduled_departure,
        arr_delay,
        dep_delay,
    FROM flight_times
    WHERE landed_at >= getvariable('window_start') - INTERVAL 7 DAYS
      AND landed_at < getvariable('window_end')
),

history AS (
    SELECT
        tailnum,
        landed_at,
        scheduled_departure,
        arr_delay,
        dep_delay,
        avg(arr_delay) OVER last_days AS arr_delay_2d,
        count(*) OVER last_week AS landed_7d,
        avg(arr_delay) OVER last_week AS arr_delay_7d,
    FROM landings
    WINDOW
        last_days AS (
            PARTITION BY tailnum ORDER BY landed_at RANGE INTERVAL 2 DAYS PRECEDING
        ),
        last_week AS (
            PARTITION BY tailnum ORDER BY landed_at RANGE INTERVAL 7 DAYS PRECEDING
        )
)

SELECT
    tailnum,
    landed_at AS event_timestamp,
    landed_at + INTERVAL 5 MINUTES AS created,
    arr_delay::FLOAT AS last_arr_delay,
    dep_delay::FLOAT AS last_dep_delay,
    arr_delay_2d::FLOAT AS arr_delay_2d,
    landed_7d::FLOAT AS landed_7d,
    arr_delay_7d::FLOAT AS arr_delay_7d,
FROM history
WHERE landed_at >= getvariable('window_start')
QUALIFY row_number() OVER (
    PARTITION BY tailnum, landed_at ORDER BY scheduled_departure DESC
) = 1
