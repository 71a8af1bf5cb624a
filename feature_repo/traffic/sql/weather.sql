-- Weather at the station, as observed; nothing is known of the coming day.
SELECT
    station,
    counted_at AS event_timestamp,
    counted_at + INTERVAL 5 MINUTES AS created,
    celsius::FLOAT AS celsius,
    rain_mm::FLOAT AS rain_mm,
    clouds_percent::FLOAT AS clouds_percent,
    sky,
FROM hours
WHERE counted_at >= getvariable('window_start')
  AND counted_at < getvariable('window_end')
