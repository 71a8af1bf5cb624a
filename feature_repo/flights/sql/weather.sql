-- Weather: one observation an airport and hour. The source rounds to the hour, so an observation
-- is used only from the next hour on.
SELECT
    origin,
    time_hour AS event_timestamp,
    time_hour + INTERVAL 1 HOUR AS created,
    temp::FLOAT AS temp,
    dewp::FLOAT AS dewp,
    humid::FLOAT AS humid,
    wind_dir::FLOAT AS wind_dir,
    wind_speed::FLOAT AS wind_speed,
    wind_gust::FLOAT AS wind_gust,
    precip::FLOAT AS precip,
    pressure::FLOAT AS pressure,
    visib::FLOAT AS visib,
FROM weather
WHERE time_hour >= getvariable('window_start')
  AND time_hour < getvariable('window_end')
