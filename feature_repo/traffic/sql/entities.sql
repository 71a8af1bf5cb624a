-- Whom to predict for, and when: every hour of the clock, 24 hours before it begins, with what the
-- calendar says of it. An hour in which nothing was counted has no label.
WITH clock AS (
    SELECT DISTINCT ON (datetime)
        datetime AS hour_start,
        timezone('America/Chicago', datetime) AS local_start,
        traffic_volume,
    FROM counts
    ORDER BY datetime, traffic_volume DESC NULLS LAST
),

-- Days on which people drive otherwise; the calendar alone gives them.
calendar AS (
    SELECT
        *,
        strftime(local_start, '%m-%d') AS month_day,
        dayname(local_start) AS weekday,
        extract(month FROM local_start) AS month,
        extract(day FROM local_start) AS day,
    FROM clock
)

SELECT
    strftime(hour_start, '%Y%m%dT%H%M') AS hour_id,
    hour_start - INTERVAL 24 HOURS AS event_timestamp,
    'mn-301' AS station,
    left(weekday, 3) || strftime(local_start, ' %H') AS slot,
    weekday,
    strftime(local_start, '%H') AS hour,
    CASE
        WHEN month_day IN ('12-31', '01-01') THEN 'new year'
        WHEN month_day IN ('12-24', '12-25') THEN 'christmas'
        WHEN month_day = '07-04' THEN 'independence day'
        WHEN weekday = 'Monday' AND month = 5 AND day > 24 THEN 'memorial day'
        WHEN weekday = 'Monday' AND month = 9 AND day < 8 THEN 'labor day'
        WHEN weekday = 'Thursday' AND month = 11 AND day BETWEEN 22 AND 28 THEN 'thanksgiving'
        WHEN weekday = 'Friday' AND month = 11 AND day BETWEEN 23 AND 29 THEN 'day after thanksgiving'
        ELSE 'none'
    END AS holiday,
    extract(hour FROM local_start)::FLOAT AS hour_of_day,
    extract(doy FROM local_start)::FLOAT AS day_of_year,
    traffic_volume AS volume,
    CASE WHEN traffic_volume IS NULL THEN 'not counted' END AS excluded,
FROM calendar
WHERE hour_start - INTERVAL 24 HOURS >= getvariable('window_start')
  AND hour_start - INTERVAL 24 HOURS < getvariable('window_end')
