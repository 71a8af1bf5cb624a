-- One row an hour that was counted, with its place in the week. The file has a row for every hour of
-- its clock: where nothing was counted there is no volume. In the night when clocks go forward it
-- holds an hour that never was, at the moment of the next one; of the two the later row stays.
SELECT
    'mn-301' AS station,
    datetime AS hour_start,
    datetime + INTERVAL 1 HOUR AS counted_at,
    dayname(timezone('America/Chicago', datetime)) AS weekday,
    extract(hour FROM timezone('America/Chicago', datetime)) AS hour_of_day,
    left(dayname(timezone('America/Chicago', datetime)), 3)
        || strftime(timezone('America/Chicago', datetime), ' %H') AS slot,
    traffic_volume AS volume,
    temp - 273.15 AS celsius,
    rain_1h AS rain_mm,
    clouds_all AS clouds_percent,
    weather_main AS sky,
FROM counts
WHERE traffic_volume IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY datetime ORDER BY traffic_volume DESC) = 1
