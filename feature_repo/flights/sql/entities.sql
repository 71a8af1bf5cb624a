-- Whom to predict for, and when: every flight, two hours before its scheduled departure, with what
-- its schedule says. A flight without an arrival has no label; the reason is kept.
SELECT
    carrier || flight::VARCHAR || '-' || origin || '-'
        || strftime(scheduled_departure, '%Y%m%dT%H%M') AS flight_id,
    scheduled_departure - INTERVAL 2 HOURS AS event_timestamp,
    carrier,
    origin,
    dest,
    tailnum,
    dayname(timezone('America/New_York', scheduled_departure)) AS weekday,
    hour::VARCHAR AS departure_hour,
    (hour * 60 + minute)::FLOAT AS minute_of_day,
    (epoch(scheduled_arrival - scheduled_departure) / 60)::FLOAT AS scheduled_minutes,
    (extract(hour FROM timezone(dest_time_zone, scheduled_arrival)) * 60
        + extract(minute FROM timezone(dest_time_zone, scheduled_arrival)))::FLOAT
        AS arrival_minute_of_day,
    distance::FLOAT AS distance,
    count(*) OVER (PARTITION BY origin, time_hour)::FLOAT AS departures_in_hour,
    (arr_delay > 15)::TINYINT AS is_late,
    CASE
        WHEN dep_time IS NULL THEN 'cancelled'
        WHEN arr_delay IS NULL THEN 'diverted'
    END AS excluded,
FROM flight_times
WHERE scheduled_departure - INTERVAL 2 HOURS >= getvariable('window_start')
  AND scheduled_departure - INTERVAL 2 HOURS < getvariable('window_end')
