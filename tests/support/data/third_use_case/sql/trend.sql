WITH history AS (
    SELECT
        series,
        published,
        value,
        lag(value) OVER weeks AS week_before,
        lag(value, 2) OVER weeks AS two_before,
        avg(value) OVER (PARTITION BY series ORDER BY published
            ROWS BETWEEN 4 PRECEDING AND 1 PRECEDING) AS mean_4w,
        lag(value, 52) OVER weeks AS year_before,
    FROM figures
    WHERE published >= getvariable('window_start') - INTERVAL 8880 HOURS
      AND published < getvariable('window_end')
    WINDOW weeks AS (PARTITION BY series ORDER BY published)
)

SELECT
    series,
    published AS event_timestamp,
    published + INTERVAL 5 MINUTES AS created,
    (value / week_before - 1)::FLOAT AS change_1w,
    (week_before / two_before - 1)::FLOAT AS change_before,
    (value / mean_4w - 1)::FLOAT AS change_4w,
    (value / year_before - 1)::FLOAT AS against_year,
FROM history
WHERE published >= getvariable('window_start')
