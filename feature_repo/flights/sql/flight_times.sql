-- One row a flight with all its moments in UTC. Scheduled and actual clock times in the source are
-- local to their airport; `time_hour` alone is UTC already.
WITH scheduled AS (
    SELECT
        f.*,
        f.time_hour + to_minutes(f.minute) AS scheduled_departure,
        -- Four Caribbean airports are not in the airports table; all keep Puerto Rico's time.
        coalesce(a.tzone, 'America/Puerto_Rico') AS dest_time_zone,
    FROM flights AS f
    LEFT JOIN airports AS a ON a.faa = f.dest
),

arrivals AS (
    SELECT
        *,
        date_trunc('day', timezone(dest_time_zone, scheduled_departure))
        + to_minutes(sched_arr_time // 100 * 60 + sched_arr_time % 100) AS arrival_clock,
    FROM scheduled
),

moments AS (
    SELECT
        * EXCLUDE (arrival_clock),
        -- The clock shows no date: the arrival is the first such time after the departure.
        CASE
            WHEN timezone(dest_time_zone, arrival_clock::TIMESTAMP) > scheduled_departure
                THEN timezone(dest_time_zone, arrival_clock::TIMESTAMP)
            ELSE timezone(dest_time_zone, (arrival_clock + INTERVAL 1 DAY)::TIMESTAMP)
        END AS scheduled_arrival,
    FROM arrivals
)

SELECT
    *,
    -- A flight counts as landed from its actual arrival on, never from its departure.
    scheduled_arrival + to_minutes(arr_delay) AS landed_at,
FROM moments
