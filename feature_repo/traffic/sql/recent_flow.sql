-- The station: what the latest hours were like, a row an hour that was counted.
WITH history AS (
    SELECT
        station,
        counted_at,
        volume,
        avg(volume) OVER last_3h AS volume_3h,
        avg(volume) OVER last_day AS volume_24h,
        avg(volume) OVER last_week AS volume_7d,
        avg(volume) OVER day_of_last_week AS same_day_of_last_week,
        avg(volume) OVER day_before AS day_before,
    FROM hours
    WHERE counted_at >= getvariable('window_start') - INTERVAL 338 HOURS
      AND counted_at < getvariable('window_end')
    WINDOW
        last_3h AS (PARTITION BY station ORDER BY counted_at
            RANGE BETWEEN INTERVAL 2 HOURS PRECEDING AND CURRENT ROW),
        last_day AS (PARTITION BY station ORDER BY counted_at
            RANGE BETWEEN INTERVAL 23 HOURS PRECEDING AND CURRENT ROW),
        day_before AS (PARTITION BY station ORDER BY counted_at
            RANGE BETWEEN INTERVAL 47 HOURS PRECEDING AND INTERVAL 24 HOURS PRECEDING),
        last_week AS (PARTITION BY station ORDER BY counted_at
            RANGE BETWEEN INTERVAL 167 HOURS PRECEDING AND CURRENT ROW),
        day_of_last_week AS (PARTITION BY station ORDER BY counted_at
            RANGE BETWEEN INTERVAL 191 HOURS PRECEDING AND INTERVAL 168 HOURS PRECEDING)
)

SELECT
    station,
    counted_at AS event_timestamp,
    -- A count reaches the store with the pipeline's lag.
    counted_at + INTERVAL 5 MINUTES AS created,
    volume::FLOAT AS volume_1h,
    volume_3h::FLOAT AS volume_3h,
    volume_24h::FLOAT AS volume_24h,
    volume_7d::FLOAT AS volume_7d,
    (volume_24h / nullif(day_before, 0))::FLOAT AS ratio_to_day_before,
    (volume_24h / nullif(same_day_of_last_week, 0))::FLOAT AS ratio_to_last_week,
FROM history
WHERE counted_at >= getvariable('window_start')
