-- One row a figure and week, with the next one's value. A week's figure is published on its day.
SELECT
    series_id AS series,
    datetime AS published,
    value,
    lead(value) OVER (PARTITION BY series_id ORDER BY datetime) AS next_value,
FROM weekly
